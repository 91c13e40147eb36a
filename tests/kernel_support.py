"""What kernel tests share: an example's step as device arrays, and a run in the interpreter."""

from __future__ import annotations

import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import triton

from llmctl.plugins.cuda.compiler import CompiledKernel
from llmctl.plugins.cuda.kernel import DeviceStep, LaunchEnv, StepLimits, StepShape
from llmctl.plugins.examples import Example
from llmctl.plugins.program import StepInputs

KERNEL_DTYPES = ("bfloat16", "float16")  # the cuda backend has no float32 models


def device_step(step: StepInputs, device: str = "cpu") -> DeviceStep:
    """The arrays of a step, at its own size."""
    names = DeviceStep.__dataclass_fields__
    arrays = {name: torch.from_numpy(getattr(step, name)).clone().to(device) for name in names}
    return DeviceStep(**arrays)


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


def launch_env(example: Example, extent: str = "tokens") -> LaunchEnv:
    """What the example's launches may use, on CPU tensors."""
    scratch: dict[str, torch.Tensor] = {}

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return scratch.setdefault(name, torch.zeros(shape, dtype=dtype))

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
    from llmctl.plugins.cuda.interpret import run_launches

    kernel = import_module(f"llmctl.plugins.{example.call.op}.kernel")
    env, shape = launch_env(example), step_shape(example.step)
    launches = kernel.launches(example.call, env, shape)
    assert [launch.spec for launch in launches] == kernel.kernels(example.call, env.limits)
    with np.errstate(all="ignore"):  # as on the device, inf / inf is NaN without a word
        run_launches(launches)


def disassemble(kernel: CompiledKernel) -> str:
    """The machine code of a kernel as text, by the disassembler that comes with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.cubin)
        command = [str(tools / "cuobjdump"), "-sass", "-fun", kernel.entry, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
