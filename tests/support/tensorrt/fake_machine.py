"""A machine with an RTX GPU that is made of the CPU: the fake package runs plans, references run
our operators, memory and streams are the host's. Everything between is llmctl's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.plugins.backends.cuda.kernel_spec import LaunchEnv, StepLimits, StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import OpCall, StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from support.cuda import FakeGraph, launch_sampling
from support.driver import RecordingDriver
from support.rounds_by_reference import bookkeeping_by_reference
from support.tensorrt import fake_tensorrt
from support.tensorrt.fake_tensorrt import FakeModule

OUR_OPS = ("rope_kv_write", "paged_attention")
GPU = "NVIDIA GeForce RTX 4090"
FREE_BYTES, TOTAL_BYTES = 22 * 10**9, 24 * 10**9


class ReferenceExecutor:
    """Our operators by their references, from what lies in the step's arrays when they run."""

    def extents(self, call: OpCall) -> Mapping[str, Any]:
        return {}

    def prepare(
        self, call: OpCall, env: LaunchEnv, shape: StepShape
    ) -> list[Callable[[int], None]]:
        program = ReferenceProgram([call])

        def run(stream: int) -> None:
            step = env.step
            cu_q = step.cu_q[: shape.num_requests + 1].numpy()
            kv_len = step.kv_len[: shape.num_requests].numpy()
            tokens, requests = int(cu_q[-1]), int((kv_len > 0).sum())
            slots = step.slot_mapping[: shape.num_tokens].numpy()
            written = int((slots >= 0).sum())  # a round past its end writes nothing any more
            if call.op == "rope_kv_write" and written < tokens:
                tokens = written
            program.run(
                StepInputs(
                    token_ids=step.token_ids[:tokens].numpy(),
                    position_ids=step.position_ids[:tokens].numpy(),
                    cu_q=cu_q[: requests + 1],
                    kv_len=kv_len[:requests],
                    block_tables=np.ascontiguousarray(step.block_tables[:requests].numpy()),
                    slot_mapping=slots[:tokens],
                    logit_rows=step.logit_rows[: shape.num_rows].numpy(),
                ),
                env.kv_cache,
            )

        return [run]


class HostProgram(CudaProgram):
    """`CudaProgram` in host memory."""

    def __init__(
        self,
        calls: list[OpCall],
        binaries: Sequence[Any],
        limits: StepLimits,
        device: torch.device,
        use_pdl: bool,
        runners: Mapping[str, Any],
    ) -> None:
        assert not use_pdl, "RTX kernels are launched plainly"
        ours = dict.fromkeys(OUR_OPS, ReferenceExecutor())
        super().__init__(calls, [], limits, "cpu", RecordingDriver(), use_pdl, {**runners, **ours})

    def launch(self, launches: Sequence[Any], stream: int) -> None:
        for launch in launches:
            if callable(launch):
                launch()
            else:
                launch_sampling(launch)


def pretend(monkeypatch: pytest.MonkeyPatch, module: FakeModule) -> list[FakeGraph]:
    """Make llmctl find that machine; the graphs that it captures."""
    graphs: list[FakeGraph] = []

    def capture(queue: DeviceQueue, record: Callable[[], None]) -> FakeGraph:
        graphs.append(FakeGraph(record))
        return graphs[-1]

    pretend_gpu(monkeypatch, (8, 9), GPU)
    monkeypatch.setattr(
        "llmctl.plugins.backends.tensorrt.opened.cache_folder", lambda: Path(os.devnull)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FREE_BYTES, TOTAL_BYTES))
    monkeypatch.setattr(
        "llmctl.runtime.engines.tensorrt_check.load_package", lambda backend: module
    )
    monkeypatch.setattr("llmctl.runtime.engines.open_tensorrt.CudaProgram", HostProgram)
    monkeypatch.setattr("llmctl.runtime.engines.open_tensorrt._num_sms", lambda device: 128)
    monkeypatch.setattr(
        "llmctl.runtime.engines.open_cuda.DeviceQueue", lambda _: DeviceQueue("cpu")
    )
    for place in ("engines.cuda_engine", "rounds.cuda_rounds"):
        monkeypatch.setattr(f"llmctl.runtime.{place}.capture_graph", capture)
    for place in ("rounds.verification", "drafting.draft_engine.device"):
        monkeypatch.setattr(f"llmctl.runtime.{place}.bookkeeping", bookkeeping_by_reference())
    for place in ("plugins.backends.tensorrt.execution", "runtime.engines.contiguous_engine"):
        monkeypatch.setattr(f"llmctl.{place}.ADDRESS_ALIGNMENT", 64)
    monkeypatch.setitem(fake_tensorrt.ALIGNMENT, "bytes", 64)
    return graphs


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, name: str = GPU
) -> None:
    """What torch says of the GPU; None: there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
