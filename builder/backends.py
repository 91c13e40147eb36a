"""The backends at build time: which one to use, for which GPUs, and what each refuses."""

from __future__ import annotations

from collections.abc import Callable

from llmctl.builder.models.family import ModelConfig
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.backends.cuda.arch import HOPPER

CUDA_HEAD_SIZES = (64, 80, 96, 128)
CUDA_ROW_MULTIPLE = 16  # elements: TMA and bulk copies move multiples of 16 bytes


def is_auto(backend: str) -> bool:
    """Whether the backend is chosen by the machine; never TensorRT."""
    return backend == "auto"


def choose_backend(backend: str, has_gpu: Callable[[], bool]) -> str:
    """The backend to build for; "auto" is cuda where there is a GPU for it, else cpu.

    Raises BadConfig for an unknown name.
    """
    names = ("auto", *BACKENDS)
    if backend not in names:
        raise BadConfig(f"backend is {backend}; it must be one of {', '.join(names)}")
    if is_auto(backend):
        return "cuda" if has_gpu() else "cpu"
    return backend


def has_supported_gpu() -> bool:
    """Whether torch sees a GPU that the kernels are for."""
    import torch

    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}" == HOPPER.capability


def require_cache_type(cache_type: str, backend: str) -> None:
    """Raise Unsupported for a KV cache layout that the backend's attention cannot read."""
    if cache_type == "continuous" and cache_type not in BACKENDS[backend].cache_types:
        raise Unsupported(
            f"--kv-cache-type continuous is refused: every kernel of the {backend} backend reads "
            "the paged cache",
            fix="--kv-cache-type paged, or --backend tensorrt-rtx",
        )
    if cache_type == "disabled":
        raise Unsupported(
            "--kv-cache-type disabled is refused: every token would compute the whole prompt again",
            fix="--kv-cache-type paged",
        )


def choose_capability(requested: str | None, backend: str) -> str | None:
    """The compute capability to compile kernels for; None for a backend that compiles none.

    Raises BadConfig where it has no effect and Unsupported for one without kernels. TensorRT's
    targets are chosen by `tensorrt.package.choose_targets`.
    """
    if not BACKENDS[backend].packs_linears:
        if requested is not None:
            raise BadConfig(
                f"--compute-capability {requested} has no effect on {backend} engines",
                fix="--backend cuda",
            )
        return None
    if requested not in (None, HOPPER.capability):
        raise Unsupported(
            f"--compute-capability {requested}: kernels use wgmma ({HOPPER.cuda_target}), which "
            f"only {HOPPER.capability} has",
            fix=f"--compute-capability {HOPPER.capability}",
        )
    return HOPPER.capability


def require_gpu_model(model: ModelConfig, dtype: str, backend: str, num_ranks: int) -> None:
    """Raise Unsupported for a model that the CUDA kernels cannot compute. model: what one rank
    has of it."""
    if dtype == "float32":
        raise Unsupported(
            f"the {backend} backend computes in bfloat16 or float16, and the model's dtype is "
            "float32",
            fix="--dtype bfloat16",
        )
    if model.head_size not in CUDA_HEAD_SIZES:
        raise Unsupported(
            f"the model's head size is {model.head_size}; the {backend} backend has attention for "
            f"{', '.join(map(str, CUDA_HEAD_SIZES))}",
            fix="--backend cpu",
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(model, name) % CUDA_ROW_MULTIPLE:
            whose = f"the {name} of each rank" if num_ranks > 1 else f"the model's {name}"
            raise Unsupported(
                f"{whose} is {getattr(model, name)}; the {backend} backend wants a multiple of "
                f"{CUDA_ROW_MULTIPLE}, so that rows of FP8 can be copied in bulk",
                fix="a smaller --tp-size" if num_ranks > 1 else "--backend cpu",
            )
