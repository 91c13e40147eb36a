"""Which package builds, for which GPUs, and which features it lacks.

`tensorrt_rtx` builds for GPUs that are not present; `tensorrt` builds for the GPU that is. They
have the same API; features of only some versions are looked up by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmctl.errors import BadConfig, NoDevice, Unsupported
from llmctl.plugins.backends.cuda.arch import ARCHS, HOPPER, RTX_CAPABILITIES
from llmctl.plugins.backends.tensorrt.packages import PACKAGES, load_package


@dataclass(frozen=True, slots=True)
class Package:
    """An imported TensorRT package."""

    backend: str
    trt: Any

    @property
    def name(self) -> str:
        """Its import name."""
        return PACKAGES[self.backend]

    @property
    def version(self) -> str:
        """Its version, e.g. 1.7.1.116."""
        return str(self.trt.__version__)


def require(trt: Any, owner: Any, attribute: str, what: str) -> None:
    """Raise Unsupported where an object of the package lacks an attribute that `what` needs."""
    if not hasattr(owner, attribute):
        raise Unsupported(
            f"{what} needs {type(owner).__name__}.{attribute}, which {trt.__name__} "
            f"{trt.__version__} lacks",
            fix=f"pip install --upgrade {trt.__name__.replace('_', '-')}",
        )


def open_package(backend: str) -> Package:
    """Import the package of a backend. Raises MissingPackage with the command that installs it."""
    return Package(backend, load_package(backend))


def choose_targets(requested: str | None, backend: str, is_fp8: bool) -> tuple[str, ...]:
    """The compute capabilities to build for, from a list such as "8.9,12.0" or "SM89".

    TensorRT-RTX: those asked for, or all that serve the model. TensorRT: that of this machine's
    GPU, whose name is the only one that may be asked for. Raises BadConfig, Unsupported, NoDevice.
    """
    if backend == "tensorrt":
        return (_present_gpu(requested),)
    if requested is None:
        return tuple(c for c in RTX_CAPABILITIES if ARCHS[c].has_fp8 or not is_fp8)
    targets = tuple(dict.fromkeys(_spelled(word) for word in requested.split(",")))
    for target in targets:
        if target not in RTX_CAPABILITIES:
            raise Unsupported(
                f"--compute-capability {target}: TensorRT-RTX engines are built for "
                f"{', '.join(RTX_CAPABILITIES)}"
                + ("; it does not support Hopper" if target == HOPPER.capability else ""),
                fix="--backend cuda"
                if target == HOPPER.capability
                else "--compute-capability 8.9,12.0",
            )
        if is_fp8 and not ARCHS[target].has_fp8:
            raise Unsupported(
                f"--compute-capability {target}: the engine has FP8 tensors, and GPUs before 8.9 "
                "have no FP8 tensor cores",
                fix="--compute-capability 8.9,12.0, or a checkpoint (and KV cache) in 16 bits",
            )
    return tuple(sorted(targets, key=_number))


def _present_gpu(requested: str | None) -> str:
    import torch

    if not torch.cuda.is_available():
        raise NoDevice(
            "--backend tensorrt builds for the GPU of this machine, and there is none",
            fix="--backend tensorrt-rtx builds without a GPU (for Ampere, Ada and Blackwell RTX)",
        )
    major, minor = torch.cuda.get_device_capability()
    present = f"{major}.{minor}"
    if requested is not None and _spelled(requested) != present:
        raise Unsupported(
            f"--compute-capability {requested}: TensorRT builds for the GPU of this machine, "
            f"which is {present}",
            fix=f"--compute-capability {present}",
        )
    return present


def _spelled(word: str) -> str:
    """ "8.9" of "8.9", "SM89" or "sm_89"."""
    text = word.strip().lower().removeprefix("sm").removeprefix("_")
    if "." not in text:
        text = f"{text[:-1]}.{text[-1:]}"
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise BadConfig(
            f"--compute-capability has {word!r}; numbers such as 8.9 are wanted, commas between"
        )
    return text


def _number(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)
