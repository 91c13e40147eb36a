"""Engines in which every token has FP8 products, through the whole host side of the CUDA backend:
what is true of 16-bit products is true of these."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import fp8_executor
from support.fp8_context import Said, check_continued, make_requests, next_turns, say
from support.fp8_executor import NGRAM, TwoKinds, build_small
from support.rounds_by_reference import run_rounds_by_reference

from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from llmctl.runtime.request import Request
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

executor_of = partial(fp8_executor.executor_of, products=Fp8Tokens.ALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small(tmp_path_factory.mktemp("fp8_generation"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()


@pytest.fixture(scope="module")
def alone(folder: Path, requests: list[Request]) -> list[Said]:
    """Each prompt read whole and by itself, nothing reused."""
    with executor_of(folder, reuse=False) as executor:
        return [say(executor, [request])[0] for request in requests]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 32": {"max_num_tokens": 35},
    "chunks of 100, in turns": {
        "max_num_tokens": 100,
        "scheduler": SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS),
    },
    "whole prompts": {"scheduler": SchedulerConfig(enable_chunked_context=False)},
    "pauses": {
        "blocks": 25,
        "scheduler": SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        "max_num_tokens": 150,
    },
    "host memory": {"blocks": 24, "host_blocks": 60, "max_batch_size": 2},
    "n-grams": {"draft": NGRAM},
    "a draft with": {"draft": Fp8Tokens.ALL, "max_num_tokens": 200},
    "a draft without": {"draft": Fp8Tokens.NONE},
    "a time limit": {"max_step_ms": 5.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_text_and_log_probabilities_are_the_same_in_any_way(folder, requests, alone, way) -> None:
    TwoKinds.num_fp8 = 0
    with executor_of(folder, **WAYS[way]) as executor:
        first = say(executor, requests)
        again = say(executor, requests[::-1])[::-1]
        cache, paused = executor._worker.kv_cache.stats(), executor._worker.scheduler.num_paused
        accepted = executor._worker._loop.stats.accepted_tokens
    assert first == alone and again == alone
    assert TwoKinds.num_fp8 > 0 and cache.reused_blocks > 0
    assert (paused > 0) == (way == "pauses")
    assert (cache.onboarded_blocks > 0) == (way == "host memory")
    if way.startswith("a draft"):
        assert accepted > 0


@pytest.mark.parametrize("draft", [None, Fp8Tokens.NONE, Fp8Tokens.ALL])
def test_rounds_that_the_device_leads_say_the_same(folder, alone, draft, monkeypatch) -> None:
    run_rounds_by_reference(monkeypatch)
    tokens = [said for said, _ in alone]
    with executor_of(folder, draft=draft, in_rounds=True) as executor:
        assert [said for said, _ in say(executor, make_requests(with_log_probs=False))] == tokens
        target = executor._worker._loop._target
        assert target.max_draft_len > 1 and not target.takes_trees


@pytest.mark.parametrize("reuse", [False, True])
def test_an_answer_that_is_read_back_is_what_was_generated(folder, requests, alone, reuse) -> None:
    """A prompt and the beginning of what was said of it are continued as it was."""
    with executor_of(folder, reuse=reuse, draft=NGRAM) as executor:
        check_continued(executor, requests, alone)


def test_the_next_turn_of_a_conversation_reuses_the_answer(folder, requests, alone) -> None:
    """Whole blocks of it, and a part of the last one."""
    turns = next_turns(requests, alone)
    with executor_of(folder, reuse=False) as executor:
        wanted = [say(executor, [turn])[0] for turn in turns]
    with executor_of(folder) as executor:
        assert say(executor, requests[:1]) == alone[:1]
        before = executor._worker.kv_cache.stats()
        assert say(executor, turns[:1]) == wanted[:1]
        after = executor._worker.kv_cache.stats()
        known = len(turns[0].input_token_ids) - 4  # the last token said was not computed
        assert after.reused_blocks - before.reused_blocks == known // 32
        assert say(executor, turns) == wanted


def test_the_arithmetic_is_another_than_that_of_prompts_alone(folder, requests, alone) -> None:
    """So that equal bits above say something."""
    with executor_of(folder, products=Fp8Tokens.PROMPTS) as executor:
        found = say(executor, requests)
    assert all(ours != theirs for ours, theirs in zip(found, alone, strict=True))


def test_a_draft_with_them_may_have_any_target(folder, requests) -> None:
    """Its bits are no part of the text."""
    for products in (Fp8Tokens.NONE, Fp8Tokens.PROMPTS):
        with executor_of(folder, products=products, reuse=False) as executor:
            wanted = [say(executor, [request])[0] for request in requests[-3:]]
        with executor_of(folder, products=products, draft=Fp8Tokens.ALL) as executor:
            assert say(executor, requests[-3:]) == wanted
