"""What kernel tests share: an example's step as device arrays, a run in the interpreter, and
binaries as text."""

from __future__ import annotations

import hashlib
import math
import mmap
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.backends.cuda.compiler import CompiledKernel, compile_kernel
from llmctl.plugins.backends.cuda.cubin import elf_sections
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    KernelSpec,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.backends.cuda.step_buffer import context_ends
from llmctl.plugins.core.cache_home import cache_home
from llmctl.plugins.core.calls import StepInputs, Trees, tree_lens
from llmctl.plugins.core.examples import Example
from llmctl.plugins.core.operators import operator_module
from llmctl.publish import write_cached

KERNEL_DTYPES = ("bfloat16", "float16")  # the cuda backend has no float32 models


def device_step(step: StepInputs, device: str = "cpu") -> DeviceStep:
    """The arrays of a step, at its own size."""
    arrays = {name: torch.from_numpy(array).to(device) for name, array in step_arrays(step).items()}
    return DeviceStep(**arrays)


def step_arrays(step: StepInputs) -> dict[str, NDArray[np.int32]]:
    """Copies of a step's arrays by their names on the device."""
    no_trees = Trees(np.full(step.num_requests, -1, np.int32), np.zeros((1, 1), np.int32))
    trees = step.trees or no_trees
    paths = {
        "tree_start": trees.start.copy(),
        "tree_root": step.kv_len - tree_lens(step, trees),
        "paths": trees.paths.copy(),
        "context_end": context_ends(step),
    }
    names = [name for name in DeviceStep.__dataclass_fields__ if name not in paths]
    return {name: getattr(step, name).copy() for name in names} | paths


def step_shape(step: StepInputs) -> StepShape:
    """The extents of a step without padding."""
    new = step.cu_q[1:] - step.cu_q[:-1]
    return StepShape(
        step.num_tokens,
        step.num_requests,
        step.num_rows,
        int(new.max()),
        int(step.kv_len.max()),
    )


def limits_for(example: Example) -> StepLimits:
    """Limits that the example's step just reaches."""
    step, cache = example.step, example.kv_cache
    return StepLimits(
        max_num_tokens=step.num_tokens,
        max_num_rows=step.num_rows,
        max_batch_size=step.num_requests,
        max_seq_len=int(step.kv_len.max()),
        max_draft_len=0,
        tokens_per_block=cache.shape[4],
        kv_dtype=str(cache.dtype).removeprefix("torch."),
    )


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """On a CPU without touching memory that nobody uses: scratch has room for the largest step, and
    torch writes zeros into every page."""
    if device != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def launch_env(example: Example, extent: str = "tokens") -> LaunchEnv:
    """What the example's launches may use, on CPU tensors."""
    scratch: dict[str, torch.Tensor] = {}

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = scratch[name] if name in scratch else scratch.setdefault(name, zeros(shape, dtype))
        assert tuple(found.shape) == tuple(shape) and found.dtype == dtype, name
        return found

    return LaunchEnv(
        step=device_step(example.step),
        kv_cache=example.kv_cache,
        limits=limits_for(example),
        extent="rows" if extent == "rows" else "tokens",
        scratch=make,
        use_pdl=False,
    )


def interpret(example: Example) -> None:
    """Run the example's call through its Triton launches."""
    from llmctl.plugins.backends.cuda.interpret import run_launches

    kernel = operator_module(example.call.op, "kernel")
    env, shape = launch_env(example), step_shape(example.step)
    launches = kernel.launches(example.call, env, shape)
    compiled = kernel.kernels(example.call, env.limits)
    assert all(launch.spec in compiled for launch in launches)
    with np.errstate(all="ignore"):  # as on the device, inf / inf is NaN without a word
        run_launches(launches)


def disassemble(kernel: CompiledKernel, capability: str = "9.0a") -> str:
    """The machine code of a kernel for a compute capability as text, by the disassembler that comes
    with Triton."""
    return _disassemble([kernel], capability)[0]


def compile_all(specs: Sequence[KernelSpec]) -> Iterator[tuple[KernelSpec, CompiledKernel, str]]:
    """Each with its binary and that one's machine code as text."""
    kernels = [compile_kernel(spec) for spec in specs]
    return zip(specs, kernels, _disassemble(kernels, "9.0a"), strict=True)


def _disassemble(kernels: Sequence[CompiledKernel], capability: str) -> list[str]:
    """Kept between runs, as compiled kernels are; addresses count from a place of no meaning."""
    import triton

    codes = [dict(elf_sections(kernel.cubin))[f".text.{kernel.entry}"] for kernel in kernels]
    disassembler = f"triton {triton.__version__}, {capability}\n".encode()
    folder = cache_home() / "llmctl" / "disassembled"
    paths = [folder / hashlib.sha256(disassembler + code).hexdigest() for code in codes]
    missing = {path: code for path, code in zip(paths, codes, strict=True) if not path.exists()}
    texts = dict(zip(missing, _run_disassembler([*missing.values()], capability), strict=True))
    for path, text in texts.items():
        write_cached(path, zlib.compress(text.encode(), 1))
    return [texts.get(p) or zlib.decompress(p.read_bytes()).decode() for p in paths]


def _run_disassembler(codes: Sequence[bytes], capability: str) -> list[str]:
    """All in one call, as one run of instructions: a call takes 0.3 s, however little there is."""
    import triton

    if not codes:
        return []
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code"
        path.write_bytes(b"".join(codes))
        # Without the analysis of data flow, which changes nothing in a run of plain instructions.
        command = [tool, "-ndf", "--binary", "SM" + capability.replace(".", ""), path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ends = accumulate(map(len, codes))
    starts = [
        text.index(f"/*{end - len(code):04x}*/") for code, end in zip(codes, ends, strict=True)
    ]
    return [text[start:end] for start, end in pairwise([*starts, len(text)])]
