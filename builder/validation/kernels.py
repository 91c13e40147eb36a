"""The stored binaries against what steps launch: every kernel that the operators name is there, and
takes the arguments, threads and shared memory that launches give it. Imports torch: the operators'
own `kernel.py` are asked, on tensors without memory."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmctl.builder.backends import CUDA_HEAD_SIZES
from llmctl.builder.plan import Plan, PlanKernel
from llmctl.builder.step_limits import step_limits
from llmctl.builder.validation.errors import wrong
from llmctl.errors import CorruptEngine, LlmctlError
from llmctl.plugins.backends.backend import BACKENDS

if TYPE_CHECKING:
    import torch

    from llmctl.builder.engine_format import EngineConfig
    from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, StepLimits
    from llmctl.plugins.core.calls import OpCall

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid (CUDA programming guide)
# What operators' kernels may come to on sizes that none is for.
_NO_KERNELS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def check_kernels(config: EngineConfig, plan: Plan, stored: Mapping[str, torch.Tensor]) -> None:
    """Raises CorruptEngine. stored: the cubins by `PlanKernel.tensor`. `check_plan` has passed."""
    if not BACKENDS[config.backend].on_gpu:
        return
    from llmctl.plugins.backends.cuda.compiler import is_needed

    for cache in plan.caches.values():
        if cache.head_size not in CUDA_HEAD_SIZES:
            raise wrong(f"heads of {cache.head_size} have no kernels of attention")
    limits = step_limits(plan, config.build_config)
    specs = _specs(plan, limits)
    capabilities = str(config.compute_capability).split(",")
    for capability in capabilities:
        label = capability if len(capabilities) > 1 else ""
        found = {kernel.name: kernel for kernel in plan.kernels if kernel.capability == label}
        for spec in specs:
            if not is_needed(spec, capability):
                continue
            if spec.name not in found:
                raise wrong(f"there is no kernel {spec.name!r}, which steps launch")
            _check_launch(spec, found[spec.name])
    for kernel in plan.kernels:
        _check_cubin(kernel, stored[kernel.tensor].numpy().tobytes())


def check_launches(config: EngineConfig, plan: Plan) -> int:
    """Describe every launch of the largest steps of each kind; how many there are. Raises
    CorruptEngine for a grid that no GPU takes, or another number of arguments than the kernel's."""
    from llmctl.builder.engine_kernels import plan_launches, planned_shapes

    if not BACKENDS[config.backend].on_gpu:
        return 0
    limits, count = step_limits(plan, config.build_config), 0
    for shape in planned_shapes(limits):
        for launch in plan_launches(plan, limits, shape, _scratch):
            count += 1
            grid = zip(launch.grid, _MOST_BLOCKS, strict=True)
            is_sound = all(1 <= blocks <= most for blocks, most in grid)
            if not is_sound or len(launch.arguments) != len(launch.spec.arguments):
                raise wrong(
                    f"a step of {shape.num_tokens} tokens launches {launch.spec.name!r} in a grid "
                    f"{launch.grid} with {len(launch.arguments)} arguments"
                )
    return count


def _specs(plan: Plan, limits: StepLimits) -> list[KernelSpec]:
    """What steps and rounds launch, and what the plan's `fused` calls for."""
    from llmctl.builder.engine_kernels import distinct_calls, meta_calls, step_kernels
    from llmctl.plugins.fused.decoder_layers.kernel import chain_spec, open_chains

    try:
        distinct = distinct_calls(plan)
        for call, _ in distinct:
            _check_tactic(call)
        specs = step_kernels(plan, limits, distinct)
        if plan.fused:
            calls = [call for call, _ in meta_calls(plan)]
            specs += [chain_spec(chain, limits) for chain in open_chains(calls, limits, plan.fused)]
        return specs
    except LlmctlError:
        raise
    except _NO_KERNELS as error:
        raise wrong(f"no kernels are for the plan's sizes: {error!r:.200}") from error


def _check_tactic(call: OpCall) -> None:
    """Every variant of a product can run its weight, and so many tokens."""
    if not call.op.startswith("packed_linear"):
        return
    from llmctl.plugins.ops.packed_linear.arguments import form_of, is_fp8
    from llmctl.plugins.ops.packed_linear.decode import DecodeVariant
    from llmctl.plugins.ops.packed_linear.tactics import MANY, parse_tactic

    weight = call.inputs["weight"]
    entries = parse_tactic(call.tactic)
    ends = [most for most, _ in entries]
    if ends != sorted(set(ends)):
        raise wrong(f"{call.op} {call.name!r}: the tactic {call.tactic!r} does not ascend")
    for most, name in entries:
        if name == MANY:
            continue
        variant = DecodeVariant.parse(name, form_of(call))
        row_tiles, chunks = weight.shape[:2]
        has_room = most <= variant.tokens or not (variant.split == 0 or variant.normalizes)
        is_norm = not variant.normalizes or "norm_weight" in call.inputs
        if not (has_room and is_norm and variant.fits(row_tiles, chunks, is_fp8(call))):
            raise wrong(f"{call.op} {call.name!r}: {name!r} cannot run it for {most} tokens")


def _check_launch(spec: KernelSpec, kernel: PlanKernel) -> None:
    """What launches give a kernel is what its metadata says."""
    found = kernel.metadata
    wanted = {
        "arguments": list(spec.arguments),
        "threads": 32 * spec.num_warps,
        "cluster": spec.cluster,
    }
    if not spec.is_triton:  # whose compiler decides the rest
        wanted |= {"shared_bytes": spec.shared_bytes, "entry": spec.entry}
    for name, value in wanted.items():
        if found[name] != value:
            raise wrong(
                f"kernel {kernel.name!r} has {name} {found[name]}, and launches have {value}"
            )


def _check_cubin(kernel: PlanKernel, cubin: bytes) -> None:
    """The binary's own header has such a function with such parameters."""
    from llmctl.plugins.backends.cuda.compiler import ARGUMENT_BYTES
    from llmctl.plugins.backends.cuda.cubin import read_cubin

    metadata = kernel.metadata
    hidden = (8,) * metadata["num_hidden_arguments"]
    wanted = (*(ARGUMENT_BYTES.get(kind, 8) for kind in metadata["arguments"]), *hidden)
    try:
        info = read_cubin(cubin, metadata["entry"])
    except (ValueError, LookupError, struct.error, OverflowError, MemoryError) as error:
        raise _unreadable(kernel, str(error)) from error
    if info.parameters != wanted:
        raise _unreadable(kernel, f"it has parameters of {list(info.parameters)} bytes")
    if info.max_threads and info.max_threads < metadata["threads"]:
        raise _unreadable(kernel, f"it is bounded to {info.max_threads} threads")


def _unreadable(kernel: PlanKernel, what: str) -> CorruptEngine:
    return wrong(f"the binary of kernel {kernel.name!r} is not what the plan says: {what}")


def _scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, device="meta")
