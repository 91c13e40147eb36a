"""Which backends can build and run engines here, and why the others cannot.

A check does the real thing where that is quick: it loads the CPU kernels, compiles two GPU kernels,
imports a package. Whether a GPU can run engines is judged by its compute capability and number of
multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmctl.errors import LlmctlError, MissingPackage, NoDevice, Unsupported
from llmctl.plugins.backends.cuda.arch import HOPPER, RTX_CAPABILITIES

_PROBE = 'extern "C" __global__ void probe(int* out) { out[threadIdx.x] = 1; }'
Gpus = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """One answer. detail: what was found, or why it does not work; fix: what would help."""

    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Whether engines of a backend can be made here, and run here."""

    name: str
    build: Check
    run: Check


def check_backends(gpus: Gpus, driver_cuda: str | None) -> list[Backend]:
    """All backends, those for GPUs first."""
    return [
        Backend(
            "cuda", _try(_compile_for_gpu), _try(lambda: _cuda_runs(_first(gpus, driver_cuda)))
        ),
        _tensorrt(gpus, driver_cuda),
        _tensorrt_rtx(gpus, driver_cuda),
        Backend("cpu", Check(True, "nothing is compiled"), _try(_load_cpu)),
    ]


def check_quantize() -> Check:
    """Whether checkpoints can be quantized."""
    return _try(_import_modelopt)


def _try(question: Callable[[], str]) -> Check:
    """The answer, or the named failure as one."""
    try:
        return Check(True, question())
    except LlmctlError as error:
        return Check(False, str(error), error.fix)


def _load_cpu() -> str:
    from llmctl.plugins.backends.cpu.binding import instruction_sets
    from llmctl.plugins.backends.host_cores import usable_cores

    names = {"v4": "AVX-512", "v3": "AVX2", "generic": "no vector extensions"}
    best = instruction_sets()[0]
    return f"{names.get(best, best)}, {usable_cores()} threads"


def _compile_for_gpu() -> str:
    import torch

    from llmctl.plugins.backends.cuda.compiler import cache_folder, compile_anew
    from llmctl.plugins.backends.cuda.nvrtc import compile_source, version
    from llmctl.plugins.backends.cuda.sources import triton_version
    from llmctl.plugins.ops.gather_rows.kernel import gather_spec

    compile_source(_PROBE, "probe.cu", [f"--gpu-architecture={HOPPER.cuda_target}"])
    compile_anew(gather_spec(torch.empty(1, 64)))  # Triton's
    return f"Triton {triton_version()}, NVRTC {version()}, kernels kept in {cache_folder()}"


def _first(gpus: Gpus, driver_cuda: str | None) -> dict[str, Any]:
    """The GPU that a run would take. Raises NoDevice with the reason that there is none."""
    import torch

    if gpus:
        return gpus[0]
    wanted = torch.version.cuda
    if driver_cuda is None:
        raise NoDevice("there is no NVIDIA driver", fix="a machine with an NVIDIA GPU")
    if wanted is None:
        raise NoDevice(
            f"torch {torch.__version__} is built without CUDA; the driver serves CUDA "
            f"{driver_cuda}",
            fix="pip install torch (the build for CUDA)",
        )
    raise NoDevice(
        f"torch {torch.__version__} is built for CUDA {wanted} and finds no device; the driver "
        f"serves CUDA {driver_cuda}",
        fix=f"a driver for CUDA {wanted}, or a torch for CUDA {driver_cuda}; see nvidia-smi",
    )


def _cuda_runs(gpu: dict[str, Any]) -> str:
    capability = gpu["compute_capability"]
    if capability != HOPPER.capability:
        raise Unsupported(
            f"{gpu['name']} has compute capability {capability}; there are kernels for "
            f"{HOPPER.capability} (H100, H200)",
            fix="--backend tensorrt-rtx" if capability in RTX_CAPABILITIES else "--backend cpu",
        )
    if gpu["multiprocessors"] < HOPPER.num_sms:
        raise Unsupported(
            f"{gpu['name']} shows {gpu['multiprocessors']} multiprocessors; kernels need "
            f"{HOPPER.num_sms}",
            fix="a whole H100 SXM or H200, not a slice of one (MIG)",
        )
    return f"{gpu['name']}, {gpu['multiprocessors']} multiprocessors"


def _tensorrt(gpus: Gpus, driver_cuda: str | None) -> Backend:
    """TensorRT builds for the GPU that is there and runs on it."""
    package = _try(lambda: _package("tensorrt"))
    device = _try(lambda: _named(_first(gpus, driver_cuda)))
    both = package if not package.ok else device
    if both.ok:
        both = Check(True, f"{package.detail}, for {device.detail}")
    return Backend("tensorrt", both, both)


def _tensorrt_rtx(gpus: Gpus, driver_cuda: str | None) -> Backend:
    """TensorRT-RTX builds anywhere and runs on RTX GPUs."""
    package = _try(lambda: _package("tensorrt-rtx"))
    device = _try(lambda: _is_rtx(_first(gpus, driver_cuda)))
    return Backend("tensorrt-rtx", package, device if package.ok else package)


def _package(backend: str) -> str:
    from llmctl.builder.tensorrt.package import open_package

    found = open_package(backend)
    return f"{found.name} {found.version}"


def _named(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']} (compute capability {gpu['compute_capability']})"


def _is_rtx(gpu: dict[str, Any]) -> str:
    if gpu["compute_capability"] not in RTX_CAPABILITIES:
        is_hopper = gpu["compute_capability"] == HOPPER.capability
        raise Unsupported(
            f"TensorRT-RTX does not run on {_named(gpu)}: it serves RTX GPUs of "
            f"{', '.join(RTX_CAPABILITIES)}",
            fix="--backend cuda" if is_hopper else "--backend cpu",
        )
    return _named(gpu)


def _import_modelopt() -> str:
    from importlib.metadata import version
    from importlib.util import find_spec

    if find_spec("modelopt") is None:
        raise MissingPackage(
            "nvidia-modelopt is not installed", fix="pip install 'llmctl[quantize]'"
        )
    return f"nvidia-modelopt {version('nvidia-modelopt')}"
