"""Engines in which every token has FP8 products, on a GPU: the same tokens and log-probabilities
however a prompt is read, whatever is drafted, and when an answer is read back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.cuda_build import write_model
from support.fp8_context import (
    Said,
    check_continued,
    check_next_turns,
    check_same,
    make_requests,
    say,
)
from support.fp8_engines import opened

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import Request
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy

FEW, MANY = 10, 20  # drafts: of a request of a few tokens, and of one that counts as a chunk
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
ENGINES = {"all": ("enable", "enable"), "prompts": ("enable", "disable"), "none": ("disable",) * 2}
OPTIONS = ("use_fp8_context_fmha", "use_fp8_generation_fmha")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of one random model, by whose attention has FP8 products."""
    root = tmp_path_factory.mktemp("fp8_generation")
    checkpoint = write_model(root / "checkpoint", "llama", MODEL, "static")
    limits = {"max_batch_size": 8, "max_num_tokens": 2048, "max_seq_len": 2048}
    request = BuildRequest(**limits, max_draft_len=MANY)
    for name, values in ENGINES.items():
        plugins = dict(zip(OPTIONS, values, strict=True))
        run_build(plan_build(checkpoint, request, backend="cuda", plugins=plugins), root / name)
    return {name: root / name for name in ENGINES}


def executor_of(
    folders: dict[str, Path],
    target: str = "all",
    draft: str | None = None,
    drafts: int = FEW,
    **options: Any,
) -> AbstractContextManager[Executor]:
    return opened(folders, target, draft, drafts, **options)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests()


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], requests: list[Request]) -> list[Said]:
    """Each prompt read whole and by itself, nothing reused."""
    with executor_of(folders, enable_block_reuse=False) as executor:
        return [say(executor, [request])[0] for request in requests]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 32": {"max_num_tokens": 32 + 7},
    "chunks of 500": {"max_num_tokens": 500},
    "chunks in turns": {
        "max_num_tokens": 200,
        "context_chunking_policy": ContextChunkingPolicy.EQUAL_PROGRESS,
    },
    "whole prompts": {"enable_chunked_context": False},
    "pauses": {
        "scheduler_policy": CapacitySchedulerPolicy.MAX_UTILIZATION,
        "max_num_tokens": 150,
        "max_tokens": 27 * 32,
    },
    "host memory": {"max_tokens": 24 * 32, "max_batch_size": 2, "host_memory_bytes": 1 << 24},
    "n-grams": {"draft": "ngram"},
    "many n-grams": {"draft": "ngram", "drafts": MANY},
    "a draft engine with": {"draft": "all", "max_num_tokens": 300},
    "a draft engine without": {"draft": "none"},
    "many drafts": {"draft": "all", "drafts": MANY},
}


@pytest.mark.parametrize("way", WAYS)
def test_text_and_log_probabilities_are_the_same_in_any_way(
    folders: dict[str, Path], requests: list[Request], alone: list[Said], way: str
) -> None:
    with executor_of(folders, **WAYS[way]) as executor:
        check_same(executor, requests, alone)


@pytest.mark.parametrize("reuse", [False, True])
def test_an_answer_that_is_read_back_is_what_was_generated(
    folders: dict[str, Path], requests: list[Request], alone: list[Said], reuse: bool
) -> None:
    with executor_of(folders, draft="ngram", enable_block_reuse=reuse) as executor:
        check_continued(executor, requests, alone)


def test_the_next_turn_of_a_conversation_reuses_what_was_said(
    folders: dict[str, Path], requests: list[Request], alone: list[Said]
) -> None:
    check_next_turns(lambda reuse: executor_of(folders, enable_block_reuse=reuse), requests, alone)


@pytest.mark.parametrize("target", ["prompts", "none"])
def test_a_draft_engine_with_them_changes_no_targets_text(
    folders: dict[str, Path], requests: list[Request], target: str
) -> None:
    with executor_of(folders, target) as executor:
        wanted = say(executor, requests)
    with executor_of(folders, target, draft="all") as executor:
        assert say(executor, requests) == wanted


def test_products_are_others_everywhere_and_not_far_from_those_of_16_bits(
    folders: dict[str, Path], requests: list[Request], alone: list[Said]
) -> None:
    with executor_of(folders, "none") as executor:
        found = say(executor, requests)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours[1] is not None and theirs[1] is not None
        assert ours[1] != theirs[1]
        # Of the first token, whose text before is the same: attention with FP8 products is coarser.
        assert abs(ours[1][0] - theirs[1][0]) < 0.5, (ours[1][0], theirs[1][0])
