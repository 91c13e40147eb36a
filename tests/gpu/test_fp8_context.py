"""Engines whose prompts have FP8 products, on a GPU: the same tokens and log-probabilities however
a prompt is read; and others, but not far from them, than without FP8 products."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.cuda_build import write_model
from support.fp8_context import Said, check_next_turns, check_same, make_requests, say
from support.fp8_engines import opened

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import Request
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy

DRAFT_LEN = 4
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of one random model: with the option ("on") and without ("off")."""
    root = tmp_path_factory.mktemp("fp8_context")
    checkpoint = write_model(root / "checkpoint", "llama", MODEL, "static")
    limits = {"max_batch_size": 8, "max_num_tokens": 2048, "max_seq_len": 2048}
    request = BuildRequest(**limits, max_draft_len=DRAFT_LEN)
    for name, value in (("on", "enable"), ("off", "disable")):
        plugins = {"use_fp8_context_fmha": value}
        run_build(plan_build(checkpoint, request, backend="cuda", plugins=plugins), root / name)
    return {name: root / name for name in ("on", "off")}


def executor_of(
    folders: dict[str, Path], target: str = "on", draft: str | None = None, **options: Any
) -> AbstractContextManager[Executor]:
    return opened(folders, target, draft, DRAFT_LEN, **options)


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
    "chunks of 256": {"max_num_tokens": 256 + 7},
    "chunks of 512": {"max_num_tokens": 512 + 7},
    "chunks of 1024, in turns": {
        "max_num_tokens": 1024,
        "context_chunking_policy": ContextChunkingPolicy.EQUAL_PROGRESS,
    },
    "whole prompts": {"enable_chunked_context": False},
    "pauses": {
        "scheduler_policy": CapacitySchedulerPolicy.MAX_UTILIZATION,
        "max_num_tokens": 300,
        "max_tokens": 27 * 32,
    },
    "host memory": {"max_tokens": 24 * 32, "max_batch_size": 2, "host_memory_bytes": 1 << 24},
    "n-grams": {"draft": "ngram"},
    "a draft engine with": {"draft": "on", "max_num_tokens": 600},
    "a draft engine without": {"draft": "off"},
}


@pytest.mark.parametrize("way", WAYS)
def test_any_way_to_read_a_prompt_gives_the_same_bits(
    folders: dict[str, Path], requests: list[Request], alone: list[Said], way: str
) -> None:
    with executor_of(folders, **WAYS[way]) as executor:
        check_same(executor, requests, alone)


def test_the_next_turn_of_a_conversation_is_a_prompt(
    folders: dict[str, Path], requests: list[Request], alone: list[Said]
) -> None:
    check_next_turns(lambda reuse: executor_of(folders, enable_block_reuse=reuse), requests, alone)


def test_products_are_others_where_a_prompt_has_a_group(
    folders: dict[str, Path], requests: list[Request], alone: list[Said]
) -> None:
    with executor_of(folders, "off") as executor:
        found = say(executor, requests)
    for request, ours, theirs in zip(requests, found, alone, strict=True):
        assert (ours == theirs) == (len(request.input_token_ids) <= 256)
        assert ours[1] is not None and theirs[1] is not None
        # Of the first token, whose text before is the same: attention with FP8 products is coarser.
        assert abs(ours[1][0] - theirs[1][0]) < 0.5, (ours[1][0], theirs[1][0])
