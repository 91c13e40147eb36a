"""Executors over the whole host side of the CUDA backend whose attention has arithmetic of its own.

The fake device computes with the CPU's kernels, whose bits depend on no step, and where a GPU would
have FP8 products it flips a bit of what attention gives: a token that was computed otherwise than
its engine says changes every log-probability behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import Plan, read_engine_config
from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import OpCall, StepInputs, row_extents
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens
from llmctl.plugins.ops.sampling.cuda import CudaSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import DeviceDrafter, Drafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from support.cuda import FakeCapture, FakeProgram, launch_sampling
from support.cuda_build import SMALL, write_model
from support.lockstep import open_in_lockstep

LENGTH, DRAFT_LEN = 900, 3
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
NGRAM = "n-grams"  # what drafts, in place of an engine's products


def build_small(folder: Path, **ranks: Any) -> Path:
    """An engine of the cpu backend, whose plan the fake device runs. ranks: of BuildRequest."""
    fields = {**SMALL, **HEADS, "intermediate_size": 256}  # sums of which ranks can have parts
    checkpoint = write_model(folder / "checkpoint", "llama", fields, "none")
    limits = {"max_batch_size": 4, "max_num_tokens": 1024, "max_seq_len": LENGTH}
    request = BuildRequest(**limits, max_draft_len=DRAFT_LEN, tokens_per_block=32, **ranks)
    run_build(plan_build(checkpoint, request, backend="cpu"), folder / "engine")
    return folder / "engine"


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
        assert step.context_end is not None, "the device has the array in every step"
        assert step.context_end.max() < LENGTH, "what an earlier step left there"
        ends = np.repeat(step.context_end, np.diff(step.cu_q))
        of_prompts = torch.from_numpy(step.position_ids < ends)
        for call, program in self._parts:
            program.run(step, kv_cache)
            if (products := fp8_tokens(call.attributes)) is not Fp8Tokens.NONE:
                is_fp8 = of_prompts | (products is Fp8Tokens.ALL)
                TwoKinds.num_fp8 += int(is_fp8.sum())
                call.outputs["out"][: step.num_tokens].view(torch.int16)[is_fp8] ^= 4


class Device(FakeProgram):
    """A fake device that computes so."""

    def __init__(
        self, calls: list[OpCall], limits: StepLimits, row_inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__(calls, limits, row_inputs, TwoKinds(calls, row_inputs))


def with_products(plan: Plan, products: Fp8Tokens) -> Plan:
    """As an engine built with the options has it."""
    ops = (
        replace(op, attributes={**op.attributes, **products.attributes})
        if op.op == "paged_attention"
        else op
        for op in plan.ops
    )
    return replace(plan, ops=tuple(ops))


def open_engine(folder: Path, queue: DeviceQueue, products: Fp8Tokens) -> CudaEngine:
    """On the fake device, all ranks in lockstep."""
    config, edit = read_engine_config(folder), partial(with_products, products=products)
    if config.num_ranks > 1:
        return open_in_lockstep(folder, queue, make=TwoKinds, edit=edit)[0]
    plan, weights = open_with_tables(folder)
    return CudaEngine(config, edit(plan), weights, Device, queue, FakeCapture())


@contextmanager
def executor_of(
    folder: Path,
    products: Fp8Tokens,
    *,
    draft: Fp8Tokens | str | None = None,
    blocks: int = 400,
    host_blocks: int = 0,
    reuse: bool = True,
    in_rounds: bool = False,
    **options: Any,
) -> Iterator[Executor]:
    """draft: products of a draft engine, or NGRAM. in_rounds: led by the device where it can,
    with `run_rounds_by_reference`."""
    queue = DeviceQueue("cpu")

    def launch(launches: list[Launch]) -> None:
        for item in launches:
            launch_sampling(item)

    drafter: Drafter | None = None
    on_device: DeviceDrafter = NoDeviceDrafter()
    if isinstance(draft, Fp8Tokens):
        drafting = open_engine(folder, queue, draft)
        drafter = DraftEngineDrafter(drafting, DRAFT_LEN)
        on_device = DeviceDraftEngine(drafting, DRAFT_LEN)
    elif draft is not None:
        drafter = NgramDrafter(DRAFT_LEN, 3)
    cache = KvCacheConfig(blocks, enable_block_reuse=reuse, num_host_blocks=host_blocks)
    config = ExecutorConfig(cache, check_invariants=True, **options)
    target = open_engine(folder, queue, products)
    rounds = CudaRoundRunner(target, on_device, FakeCapture()) if in_rounds else None
    with Executor(target, drafter, config, CudaSampling(queue, launch), rounds) as executor:
        yield executor
        assert rounds is None or rounds._num_started > 0
