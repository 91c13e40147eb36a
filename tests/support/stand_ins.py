"""Kernels that do nothing in the place of an engine's, for tests of which ones it has and what they
are launched with: the real ones take half a second each to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from llmctl.plugins.backends.cuda import compiler
from llmctl.plugins.backends.cuda.arch import ARCHS, HOPPER
from llmctl.plugins.backends.cuda.compiler import TRITON_HIDDEN_ARGUMENTS, CompiledKernel
from llmctl.plugins.backends.cuda.cubin import read_cubin
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.backends.cuda.nvrtc import compile_source

Compile = Callable[..., CompiledKernel]
# Constants that say how many tokens or rows a binary serves, and the least.
_SIZES = {
    "ops/packed_linear/decode.cu": {"TOKENS": 8},
    "ops/paged_attention/verification/verification.cu": {"ROWS": 8},
}
# Options of Triton's attention with which a kernel has more to do.
_OPTIONS = ("HAS_WINDOW", "STATIC")
_TYPES = {"i32": "int", "i64": "long long", "fp32": "float", "tensor_map": "Map"}


@contextmanager
def stand_in_kernels() -> Iterator[None]:
    """Engines that are built here have kernels of the right names, arguments and sizes, and
    nothing in them. No cache keeps these."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compiler, "compile_kernel", stand_in)
        yield


@contextmanager
def one_of_each_kind() -> Iterator[Compile]:
    """Kernels of an engine that differ in sizes alone are compiled for the smallest, those of
    Triton's attention with all options; stand-ins are there for the others, which take as long
    again. Gives what compiles them."""
    compile_kernel = compiler.compile_kernel

    def compile_some(spec: KernelSpec, capability: str = HOPPER.capability) -> CompiledKernel:
        sizes = _SIZES.get(spec.source, {})
        is_smallest = all(spec.constants[name] == least for name, least in sizes.items())
        has_less = spec.is_triton and any(spec.constants.get(n) is False for n in _OPTIONS)
        return (compile_kernel if is_smallest and not has_less else stand_in)(spec, capability)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compiler, "compile_kernel", compile_some)
        yield compile_some


def stand_in(spec: KernelSpec, capability: str = HOPPER.capability) -> CompiledKernel:
    """One that does nothing, as `compile_kernel` gives the kernel of a spec."""
    hidden = TRITON_HIDDEN_ARGUMENTS if spec.is_triton else 0
    entry, threads = spec.entry or "stand_in", 32 * spec.num_warps
    cubin = _empty(entry, (*spec.arguments, *("*u8",) * hidden), threads, capability)
    info = read_cubin(cubin, entry)
    return CompiledKernel(
        *(spec.name, entry, cubin, threads, spec.shared_bytes, spec.arguments),
        *(spec.cluster, hidden, info.registers, info.local_bytes),
    )


@cache
def _empty(entry: str, arguments: tuple[str, ...], threads: int, capability: str) -> bytes:
    given = ", ".join(f"{_TYPES.get(kind, 'void*')} a{n}" for n, kind in enumerate(arguments))
    source = f"""
        struct alignas(64) Map {{ char bytes[128]; }};
        extern "C" __global__ void __launch_bounds__({threads}) {entry}({given}) {{}}
    """
    target = ARCHS[capability].cuda_target or f"sm_{capability.replace('.', '')}"
    return compile_source(source, "stand_in.cu", [f"--gpu-architecture={target}"])
