"""Calls and programs whose launches are recorded."""

from __future__ import annotations

import ctypes

import torch

from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    StepLimits,
    StepShape,
)
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.core.calls import OpCall

LIMITS = StepLimits(
    max_num_tokens=96,
    max_num_rows=8,
    max_batch_size=4,
    max_seq_len=100,
    max_draft_len=3,
    tokens_per_block=32,
    kv_dtype="bfloat16",
)


SHAPE = StepShape(num_tokens=7, num_requests=2, num_rows=2, max_query_len=4, max_kv_len=60)


STREAM = 77


class Recorder:
    """Keeps what a program asks of the driver; copies are done when their event is waited for."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, ...], tuple[object, ...], bool, int]] = []
        self.loaded: list[str] = []
        self.copies: list[tuple[int, int, int, int]] = []
        self.events: list[Event] = []
        self.num_prepared = self.num_rebound = 0

    def make_current(self) -> None:
        pass

    def load(self, kernel: CompiledKernel) -> str:
        self.loaded.append(kernel.name)
        return kernel.name

    def prepare(self, loaded, grid, arguments, use_pdl):
        self.num_prepared += 1
        return Recorded(self, (loaded, grid, arguments, use_pdl))

    def rebind(self, launch: Recorded, tensors) -> Recorded:
        self.num_rebound += 1
        loaded, grid, arguments, use_pdl = launch.what
        arguments = tuple(tensors.get(at, kept) for at, kept in enumerate(arguments))
        return Recorded(self, (loaded, grid, arguments, use_pdl))

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.copies.append((target, source, num_bytes, stream))
        ctypes.memmove(target, source, num_bytes)

    def make_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


class Recorded:
    """A launch that only says that it was enqueued."""

    def __init__(self, recorder: Recorder, what: tuple[object, ...]) -> None:
        self.recorder, self.what = recorder, what

    def __call__(self, stream: int) -> None:
        self.recorder.launched.append((*self.what, stream))


class Event:
    """Counts: a copy's event must be waited for before its memory is written again."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self, stream: int) -> None:
        assert stream == STREAM
        self.recorded += 1

    def wait(self) -> None:
        self.waited += 1
        assert self.waited == self.recorded + 1  # never recorded counts as passed


def spec_of(call: OpCall) -> KernelSpec:
    return KernelSpec(f"{call.op}.sample", "x.cu", ("*bf16",), entry=call.op)


def binary(name: str) -> CompiledKernel:
    return CompiledKernel(name, "f", b"", 128, 0, ("*bf16",), 1, 0, 16, 0)


def launches(call: OpCall, env, shape: StepShape) -> list[Launch]:
    rows = env.count(shape)
    scratch = env.scratch("counter", (4,), torch.int32)
    tensor = call.inputs.get("x", call.inputs.get("weight"))
    layer = call.attributes.get("layer")
    cache = env.kv_cache if layer is None else env.kv_cache[int(layer)]
    arguments = (tensor, cache, scratch, call.outputs["out"])
    return [Launch(spec_of(call), (rows, 1, 1), arguments)]


def make_calls() -> list[OpCall]:
    """embedding -> gather -> quantize: tokens, then rows."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    hidden, rows = zeros(96, 16), zeros(8, 16)
    quantized = zeros(8, 16, dtype=torch.float8_e4m3fn)
    scale = torch.ones(1)
    return [
        OpCall("embedding", "e", {"weight": zeros(50, 16)}, {"out": hidden}, {}),
        OpCall("gather_rows", "g", {"x": hidden}, {"out": rows}, {}),
        OpCall("quantize", "q", {"x": rows, "scale": scale}, {"out": quantized}, {}),
    ]


def make_program(**changes) -> tuple[CudaProgram, Recorder]:
    recorder = Recorder()
    calls = make_calls()
    names = [f"{call.op}.sample" for call in calls]
    arguments = {"binaries": [binary(name) for name in names], "limits": LIMITS, **changes}
    program = CudaProgram(calls, device="cpu", driver=recorder, **arguments)
    program.bind_kv_cache(torch.zeros(1, 3, 2, 1, 32, 16))
    return program, recorder
