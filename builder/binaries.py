"""Compiled code of an engine: llmctl's kernels and TensorRT's plans, and for which GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmctl.builder.backends import choose_capability
from llmctl.builder.config import BuildConfig
from llmctl.builder.engine_format import Plan, PlanKernel
from llmctl.builder.engine_kernels import (
    OnKernel,
    compile_kernels,
    fused_calls,
    kernel_specs,
    plan_kernel,
    scratch_bytes,
)
from llmctl.builder.step_limits import step_limits
from llmctl.builder.tensorrt.engine import compile_pieces
from llmctl.builder.tensorrt.package import Package, choose_targets, open_package
from llmctl.builder.tensorrt.pieces import Piece
from llmctl.plugins.backends.backend import BACKENDS

Binaries = dict[str, bytes]  # by the name of the engine file's tensor


@dataclass(frozen=True, slots=True)
class Target:
    """The GPUs that an engine is compiled for (none for the cpu backend), and what compiles
    plans."""

    capabilities: tuple[str, ...]
    package: Package | None = None

    @property
    def compute_capability(self) -> str | None:
        """As config.json has it."""
        return ",".join(self.capabilities) or None

    @property
    def versions(self) -> dict[str, str]:
        """The version of TensorRT, where there is one."""
        return {self.package.name: self.package.version} if self.package else {}


def find_package(backend: str) -> Package | None:
    """What compiles the plans of a backend, if it has any. Raises MissingPackage."""
    return open_package(backend) if BACKENDS[backend].compiles_plans else None


def choose_target(
    backend: str, package: Package | None, requested: str | None, is_fp8: bool
) -> Target:
    """What to compile for. Raises BadConfig, Unsupported, NoDevice."""
    if package is not None:
        return Target(choose_targets(requested, backend, is_fp8), package)
    capability = choose_capability(requested, backend)
    return Target(() if capability is None else (capability,))


def make_binaries(
    plan: Plan,
    pieces: Sequence[Piece],
    limits: BuildConfig,
    plugin_config: Mapping[str, str],
    target: Target,
    on_kernel: OnKernel,
) -> tuple[Plan, Binaries, dict[str, str]]:
    """(the plan with its kernels, TensorRT plans and scratch, their bytes, what compiled kernels).

    Raises MissingPackage, KernelCompileError.
    """
    binaries: Binaries = {}
    if target.package is not None:
        described, binaries = compile_pieces(
            target.package, pieces, limits, plugin_config, target.capabilities, on_kernel
        )
        plan = replace(plan, trt_pieces=described)
    kernels: list[PlanKernel] = []
    scratch = 0
    compilers: dict[str, str] = {}
    from llmctl.plugins.backends.cuda.compiler import compiler_versions, is_needed

    for capability in target.capabilities:
        sizes = step_limits(plan, limits.to_dict())
        label = capability if len(target.capabilities) > 1 else ""
        specs = [spec for spec in kernel_specs(plan, sizes) if is_needed(spec, capability)]
        compilers |= compiler_versions(specs)
        for kernel in compile_kernels(specs, capability, on_kernel):
            kernels.append(plan_kernel(kernel, label))
            binaries[kernels[-1].tensor] = kernel.cubin
        scratch = max(scratch, scratch_bytes(plan, sizes))
        names = {spec.name for spec in specs}
        fused = tuple(each for each in fused_calls(plan, sizes) if each.kernel in names)
        plan = replace(plan, fused=fused)
    return replace(plan, kernels=tuple(kernels), scratch_bytes=scratch), binaries, compilers
