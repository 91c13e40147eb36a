"""Times the host's work for a step with a new number of tokens, without a GPU.

    python -m scripts.bench.packing 1b 8b 8b:2 70b:2

A prompt of a length that was not seen before is described, packed and enqueued, forty times, on a
driver whose calls do nothing: what is left out is a tensor map for each description, and launching.
"8b:2" is a rank of two.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Sequence
from statistics import median
from unittest.mock import patch

import torch

from llmctl.builder.engine_kernels import fused_calls, kernel_specs, meta_cache
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.driver import CudaDriver
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Peers, StepShape
from llmctl.plugins.backends.cuda.program import CudaProgram
from scripts.bench.plan_support import bound, planned
from scripts.models.planted_shapes import SHAPES

FIRST, COUNT = 500, 40  # tokens of the first prompt, and prompts


class Function:
    """Of a library: it does nothing, and succeeds."""

    argtypes: Sequence[object] = ()

    def __call__(self, *arguments: object) -> int:
        return 0


class SilentLibrary:
    """A CUDA driver that has no device and never fails."""

    def __getattr__(self, name: str) -> Function:
        setattr(self, name, Function())
        return self.__dict__[name]


def program_of(name: str, ranks: int) -> CudaProgram:
    """An FP8 model's program, one rank's of so many, its tensors without memory."""
    plan, limits = planned(name, ranks=ranks)
    kernels = map(without_code, kernel_specs(plan, limits))
    with patch("ctypes.CDLL", return_value=SilentLibrary()):
        driver = CudaDriver()
    program = CudaProgram(
        *(bound(plan), kernels, limits, "meta", driver),
        fused=fused_calls(plan, limits),
        peers=peers_of(ranks) if ranks > 1 else None,
    )
    program.bind_kv_cache(meta_cache(plan, limits))
    return program


def peers_of(ranks: int) -> Peers:
    """What rank 0 shares with others that are not there."""
    bases, state, lost = (
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in ((ranks, torch.int64), (4, torch.int32), (4, torch.int32))
    )
    return Peers(0, ranks, bases, state, lost, slot_bytes=1 << 40, limit_ns=1)


def without_code(spec: KernelSpec) -> CompiledKernel:
    """As much of a compiled kernel as packing its launches takes."""
    return CompiledKernel(
        spec.name, spec.entry, b"", 128, spec.shared_bytes, spec.arguments, spec.cluster, 0, 16, 0
    )


def milliseconds(program: CudaProgram, tokens: int) -> float:
    """Of enqueueing a prompt of that length."""
    shape = StepShape(
        num_tokens=tokens, num_requests=1, num_rows=1, max_query_len=tokens, max_kv_len=2048
    )
    start = time.perf_counter()
    program.enqueue(shape, 0)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Model after model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", metavar="SHAPE[:RANKS]")
    arguments = parser.parse_args()
    print(f"python {platform.python_version()}, torch {torch.__version__}")
    for name in arguments.shapes:
        shape, _, ranks = name.partition(":")
        if shape not in SHAPES:
            parser.error(f"{name}: one of {', '.join(SHAPES)} is wanted")
        program = program_of(shape, int(ranks or 1))
        milliseconds(program, FIRST - 1)
        gc.collect()
        gc.freeze()  # as the runtime does once an engine is open
        new = sorted(milliseconds(program, FIRST + number) for number in range(COUNT))
        known = sorted(milliseconds(program, FIRST + number) for number in range(COUNT))
        print(
            f"{name}: ms a prompt of a new length: least {new[0]:.2f}, median {median(new):.2f}, "
            f"most {new[-1]:.2f}; of a known one {median(known):.2f}"
        )


if __name__ == "__main__":
    main()
