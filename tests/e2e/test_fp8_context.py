"""Prompts with arithmetic of their own through the whole host side of the CUDA backend.

The fake device computes with the CPU's kernels, whose bits depend on no step, and where a GPU would
have FP8 products it flips a bit of what attention gives: a token that was computed otherwise than
its position says changes every log-probability behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cuda import FakeProgram, launch_sampling
from support.cuda_build import SMALL, write_model
from support.fp8_context import Said, check_next_turns, make_requests, say

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan, read_engine_config
from llmctl.errors import PairMismatch
from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import OpCall, StepInputs, row_extents
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.request import Request
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

LENGTH, DRAFT_LEN = 900, 3
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


class TwoKinds:
    """The CPU's kernels one by one; counts the tokens whose attention is another."""

    num_fp8 = 0

    def __init__(self, calls: list[OpCall], row_inputs: Sequence[torch.Tensor]) -> None:
        extents = row_extents(calls, row_inputs=row_inputs)
        self._parts = []
        for call, extent in zip(calls, extents, strict=True):
            rows = [call.inputs[role] for role in ("x", "residual") if role in call.inputs]
            self._parts.append((call, CpuProgram([call], rows if extent == "rows" else ())))

    def run(self, step: StepInputs, kv_cache: torch.Tensor) -> None:
        ends = np.repeat(context_end_of(step), np.diff(step.cu_q))
        is_fp8 = torch.from_numpy(step.position_ids < ends)
        for call, program in self._parts:
            program.run(step, kv_cache)
            if call.attributes.get("fp8_context", False):
                TwoKinds.num_fp8 += int(is_fp8.sum())
                call.outputs["out"][: step.num_tokens].view(torch.int16)[is_fp8] ^= 4


def context_end_of(step: StepInputs) -> NDArray[np.int32]:
    assert step.context_end is not None, "the device has the array in every step"
    assert step.context_end.max() < LENGTH, "what an earlier step left there"
    return step.context_end


class Device(FakeProgram):
    """A fake device that computes so."""

    def __init__(
        self, calls: list[OpCall], limits: StepLimits, row_inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(calls, limits, row_inputs, TwoKinds(calls, row_inputs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the cpu backend, whose plan the fake device runs."""
    root = tmp_path_factory.mktemp("fp8_context")
    checkpoint = write_model(root / "checkpoint", "llama", {**SMALL, **HEADS}, "none")
    limits = {"max_batch_size": 4, "max_num_tokens": 1024, "max_seq_len": LENGTH}
    request = BuildRequest(**limits, max_draft_len=DRAFT_LEN, tokens_per_block=32)
    run_build(plan_build(checkpoint, request, backend="cpu"), root / "engine")
    return root / "engine"


def with_fp8_context(plan: Plan) -> Plan:
    ops = (
        replace(op, attributes={**op.attributes, "fp8_context": True})
        if op.op == "paged_attention"
        else op
        for op in plan.ops
    )
    return replace(plan, ops=tuple(ops))


def open_engine(folder: Path, queue: DeviceQueue, is_on: bool = True) -> CudaEngine:
    plan, weights = open_with_tables(folder)
    plan = with_fp8_context(plan) if is_on else plan
    return CudaEngine(read_engine_config(folder), plan, weights, Device, queue, lambda record: None)


@contextmanager
def executor_of(
    folder: Path,
    *,
    is_on: bool = True,
    draft: bool | None = None,
    blocks: int = 400,
    host_blocks: int = 0,
    reuse: bool = True,
    **options: Any,
) -> Iterator[Executor]:
    """draft: a draft engine with FP8 products, or without."""
    queue = DeviceQueue("cpu")

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launch_sampling(item)

    drafter = None
    if draft is not None:
        drafter = DraftEngineDrafter(open_engine(folder, queue, draft), DRAFT_LEN)
    cache = KvCacheConfig(blocks, enable_block_reuse=reuse, num_host_blocks=host_blocks)
    config = ExecutorConfig(cache, check_invariants=True, **options)
    target = open_engine(folder, queue, is_on)
    with Executor(target, drafter, config, CudaSampling(queue, launch)) as executor:
        yield executor


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
    "a draft with": {"draft": True, "max_num_tokens": 400},
    "a draft without": {"draft": False},
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
    with executor_of(folder, is_on=False) as executor:
        found = say(executor, requests)
    is_same = [ours == theirs for ours, theirs in zip(found, alone, strict=True)]
    lengths = [len(request.input_token_ids) for request in requests]
    assert is_same == [length <= 256 for length in lengths]


def test_a_draft_engine_cannot_have_them_alone(folder) -> None:
    with (
        pytest.raises(PairMismatch, match="reads prompts with FP8 products") as caught,
        executor_of(folder, is_on=False, draft=True),
    ):
        pass
    assert "--use_fp8_context_fmha disable" in str(caught.value.fix)
