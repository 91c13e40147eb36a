"""Prompts with arithmetic of their own through the whole host side of the CUDA backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import fp8_executor
from support.fp8_context import Said, check_next_turns, make_requests, say
from support.fp8_executor import TwoKinds, build_small

from llmctl.errors import PairMismatch
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens
from llmctl.runtime.request import Request
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

executor_of = partial(fp8_executor.executor_of, products=Fp8Tokens.PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small(tmp_path_factory.mktemp("fp8_context"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()


@pytest.fixture(scope="module")
def alone(folder: Path, requests: list[Request]) -> list[Said]:
    """Each prompt read whole and by itself, nothing reused."""
    with executor_of(folder, reuse=False) as executor:
        return [say(executor, [request])[0] for request in requests]


POLICIES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 256": {"max_num_tokens": 256 + 3},
    "chunks of 512, in turns": {
        "max_num_tokens": 600,
        "scheduler": SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS),
    },
    "whole prompts": {"scheduler": SchedulerConfig(enable_chunked_context=False)},
    "pauses": {
        "blocks": 25,
        "scheduler": SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        "max_num_tokens": 300,
    },
    "host memory": {"blocks": 24, "host_blocks": 60, "max_batch_size": 2},
    "a draft with": {"draft": Fp8Tokens.PROMPTS, "max_num_tokens": 400},
    "a draft without": {"draft": Fp8Tokens.NONE},
    "a time limit": {"max_step_ms": 5.0},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_any_way_to_read_a_prompt_gives_the_same_bits(folder, requests, alone, policy) -> None:
    TwoKinds.num_fp8 = 0
    with executor_of(folder, **POLICIES[policy]) as executor:
        first = say(executor, requests)
        again = say(executor, requests[::-1])[::-1]
        cache, paused = executor._worker.kv_cache.stats(), executor._worker.scheduler.num_paused
    assert first == alone and again == alone
    assert TwoKinds.num_fp8 > 0 and cache.reused_blocks > 0
    assert (paused > 0) == (policy == "pauses")
    assert (cache.onboarded_blocks > 0) == (policy == "host memory")


def test_the_next_turn_of_a_conversation_is_a_prompt(folder, requests, alone) -> None:
    check_next_turns(lambda reuse: executor_of(folder, reuse=reuse), requests, alone)


def test_the_arithmetic_is_another(folder, requests, alone) -> None:
    """So that equal bits above say something; prompts without a group are not touched."""
    with executor_of(folder, products=Fp8Tokens.NONE) as executor:
        found = say(executor, requests)
    is_same = [ours == theirs for ours, theirs in zip(found, alone, strict=True)]
    lengths = [len(request.input_token_ids) for request in requests]
    assert is_same == [length <= 256 for length in lengths]


@pytest.mark.parametrize("products", [Fp8Tokens.NONE, Fp8Tokens.ALL])
def test_a_draft_engine_cannot_have_them_where_the_target_has_no_groups(folder, products) -> None:
    with (
        pytest.raises(PairMismatch, match="reads prompts with FP8 products") as caught,
        executor_of(folder, products=products, draft=Fp8Tokens.PROMPTS),
    ):
        pass
    assert "--use_fp8_context_fmha disable" in str(caught.value.fix)
