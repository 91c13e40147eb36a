"""Checks that this machine can run a TensorRT engine, before a plan or a weight is read.

TensorRT-RTX supports only RTX GPUs and not Hopper; full TensorRT runs where the engine was built.
Every error names the GPU, the package and the alternative.
"""

from __future__ import annotations

from typing import Any

import torch

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import NoDevice, RebuildNeeded, Unsupported
from llmctl.plugins.backends.cuda.arch import HOPPER, RTX_CAPABILITIES
from llmctl.plugins.backends.tensorrt.packages import PACKAGES, load_package


def require_tensorrt(config: EngineConfig) -> Any:
    """The package that runs the engine here.

    Raises NoDevice without a GPU, MissingPackage without it, RebuildNeeded for a GPU that the
    engine is not for, Unsupported for an engine of several ranks.
    """
    wanted = str(config.compute_capability or "").split(",")
    built = (
        f"the engine was built for backend {config.backend!r} (package "
        f"{PACKAGES[config.backend]}, compute capability {' or '.join(wanted)})"
    )
    found = _require_gpu(config.backend, built)
    if found not in wanted:
        raise RebuildNeeded(
            f"{built}; {torch.cuda.get_device_name()} has {found}",
            fix=_alternatives(config.backend, found),
        )
    if config.num_ranks > 1:
        raise Unsupported(
            f"{built}; it has {config.num_ranks} ranks, and this version runs one GPU",
            fix="build with --tp_size 1",
        )
    return load_package(config.backend)


def require_machine(backend: str) -> Any:
    """The package of a backend on a machine whose GPU it serves. Raises as `require_tensorrt`."""
    _require_gpu(backend, f"backend {backend!r} (package {PACKAGES[backend]}) is requested")
    return load_package(backend)


def _require_gpu(backend: str, asked: str) -> str:
    """The compute capability of a GPU that the backend's package serves; `asked` begins what is
    said where there is none."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            found = f"this torch ({torch.__version__}) is built without CUDA"
        else:
            found = f"torch {torch.__version__} finds no CUDA device"
        raise NoDevice(f"{asked}; {found}", fix=_alternatives(backend, None))
    found = present_capability()
    if backend == "tensorrt-rtx" and found not in RTX_CAPABILITIES:
        raise RebuildNeeded(
            f"{asked}; TensorRT-RTX does not run on {torch.cuda.get_device_name()} (compute "
            f"capability {found}): it serves RTX GPUs of {', '.join(RTX_CAPABILITIES)}",
            fix=_alternatives(backend, found),
        )
    return found


def present_capability() -> str:
    """The compute capability of the GPU that is there."""
    return "{}.{}".format(*torch.cuda.get_device_capability())


def _alternatives(backend: str, found: str | None) -> str:
    """What else would do on a GPU of this compute capability, or on none."""
    if found is None:
        where = "an RTX GPU" if backend == "tensorrt-rtx" else "the GPU it was built for"
        return f"run it where there is {where}, or rebuild with: llmctl build --backend cpu"
    if found == HOPPER.capability:
        return (
            "rebuild with: llmctl build --backend cuda (our kernels for Hopper), "
            "--backend tensorrt on this machine, or --backend cpu"
        )
    if found in RTX_CAPABILITIES:
        return (
            f"rebuild with: llmctl build --backend tensorrt-rtx --compute-capability {found}, "
            "or --backend cpu"
        )
    return "rebuild with: llmctl build --backend cpu"
