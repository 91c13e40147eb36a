"""Can this machine run a TensorRT engine? Asked before a plan or a weight is read.

TensorRT-RTX serves RTX GPUs only and refuses Hopper; full TensorRT runs where it was built. Every
refusal names the GPU, the package and what else would do.
"""

from __future__ import annotations

from typing import Any

import torch

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import NoDevice, RebuildNeeded, Unsupported
from llmctl.plugins.tensorrt.library import PACKAGES, load_package

RTX_CAPABILITIES = ("8.6", "8.9", "12.0")  # Ampere, Ada and Blackwell RTX: all that RTX serves here
BACKENDS = tuple(PACKAGES)
_HOPPER = "9.0"


def require_tensorrt(config: EngineConfig) -> Any:
    """The package that runs the engine here.

    Raises NoDevice without a GPU or without the package, RebuildNeeded for a GPU that the engine is
    not for, Unsupported for an engine of several ranks.
    """
    wanted = str(config.compute_capability or "").split(",")
    package = PACKAGES[config.backend]
    built = f"the engine was built for backend {config.backend!r} (package {package}, " + (
        f"compute capability {' or '.join(wanted)})"
    )
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            found = f"this torch ({torch.__version__}) is built without CUDA"
        else:
            found = f"torch {torch.__version__} finds no CUDA device"
        raise NoDevice(f"{built}; {found}", fix=_alternatives(config.backend, None))
    name = torch.cuda.get_device_name()
    found = "{}.{}".format(*torch.cuda.get_device_capability())
    if config.backend == "tensorrt-rtx" and found not in RTX_CAPABILITIES:
        raise RebuildNeeded(
            f"{built}; TensorRT-RTX does not run on {name} (compute capability {found}): it serves "
            f"RTX GPUs of {', '.join(RTX_CAPABILITIES)}",
            fix=_alternatives(config.backend, found),
        )
    if found not in wanted:
        raise RebuildNeeded(
            f"{built}; {name} has {found}", fix=_alternatives(config.backend, found)
        )
    if (ranks := int(config.build_config.get("tp_size", 1))) > 1:
        raise Unsupported(
            f"{built}; it has {ranks} ranks, and this version runs one GPU",
            fix="build with --tp_size 1",
        )
    return load_package(config.backend)


def present_capability() -> str:
    """The compute capability of the GPU that is there."""
    return "{}.{}".format(*torch.cuda.get_device_capability())


def _alternatives(backend: str, found: str | None) -> str:
    """What else would do on a GPU of this compute capability, or on none."""
    if found is None:
        where = "an RTX GPU" if backend == "tensorrt-rtx" else "the GPU it was built for"
        return f"run it where there is {where}, or rebuild with: llmctl build --backend cpu"
    if found == _HOPPER:
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
