"""Compiles networks to serialized plans, with the builder's report on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmctl.builder.tensorrt.networks import PieceNetwork
from llmctl.builder.tensorrt.package import Package
from llmctl.builder.tensorrt.report import describe_engine
from llmctl.errors import KernelCompileError
from llmctl.plugins.backends.tensorrt.packages import shared_logger

_SERIOUS = ("ERROR", "INTERNAL_ERROR")


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """A serialized plan. `profiles` is `report.describe_engine`'s, with the profiles' sizes."""

    name: str
    plan: bytes
    profiles: tuple[dict[str, Any], ...]


def compile_network(package: Package, piece: PieceNetwork, targets: Sequence[str]) -> CompiledPiece:
    """Build one network for compute capabilities. Raises KernelCompileError with TensorRT's
    message.

    One stream: parallel branches would become signals and waits between kernels.
    """
    trt = package.trt
    logger = shared_logger(trt)
    logger.lines.clear()
    config = piece.builder.create_builder_config()
    config.max_aux_streams = 0
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # TensorRT-RTX: without it a plan may allocate while it runs, and cannot be captured.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if hasattr(trt, "ComputeCapability"):  # only TensorRT-RTX builds for a GPU that is absent
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            capability = getattr(trt.ComputeCapability, f"SM{target.replace('.', '')}")
            if not config.set_compute_capability(capability, index):
                raise _failed(package, piece, f"it refuses compute capability {target}", logger)
    if hasattr(trt.PreviewFeature, "MULTIDEVICE_RUNTIME_10_16"):  # 10.16 hides collectives there
        config.set_preview_feature(trt.PreviewFeature.MULTIDEVICE_RUNTIME_10_16, True)
    for profile in piece.profiles:
        described = piece.builder.create_optimization_profile()
        for binding in piece.bindings:
            if binding.is_input and any(isinstance(dim, str) for dim in binding.shape):
                described.set_shape(binding.name, *(profile.shape(binding, i) for i in range(3)))
        if config.add_optimization_profile(described) < 0:
            raise _failed(package, piece, f"it refuses the profile {profile.name}", logger)
    try:
        plan = piece.builder.build_serialized_network(piece.network, config)
    except Exception as error:  # the binding raises what its C++ met
        raise _failed(package, piece, str(error), logger) from error
    if plan is None:
        raise _failed(package, piece, "it built nothing", logger)
    profiles = describe_engine(logger.lines, [profile.name for profile in piece.profiles])
    for report, profile in zip(profiles, piece.profiles, strict=True):
        report["sizes"] = {name: list(sizes) for name, sizes in profile.sizes.items()}
    logger.lines.clear()
    return CompiledPiece(piece.name, bytes(plan), tuple(profiles))


def _failed(package: Package, piece: PieceNetwork, what: str, logger: Any) -> KernelCompileError:
    words = [message for severity, message in logger.lines if severity in _SERIOUS]
    said = f": {words[0]}" if words else ""
    return KernelCompileError(
        f"{package.name} {package.version} does not build the piece {piece.name}: {what}{said}"
    )
