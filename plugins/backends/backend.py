"""The table of backends: what each can do, as the builder, the runtime and the command line ask it.

To add one: a folder beside this file, a row here, and an opener of its engines (runtime/engines).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """Who executes a plan, and what that allows of it."""

    name: str
    on_gpu: bool
    kernels: str  # whose kernels its own operators run: the first part of their tactics
    arena_alignment: int  # bytes
    compiles_plans: bool = False  # TensorRT's: the network is cut into plans of its own
    packs_linears: bool = False  # products read weights packed for the tensor core
    gathers_fp8: bool = True
    has_block_scales: bool = True  # products of weights that have a scale for each block
    cache_types: tuple[str, ...] = ("paged",)
    quantized_kv_cache: tuple[str, ...] = ("fp8", "int8")
    has_unit_kv_scales: bool = True
    has_windows_at_run_time: bool = True
    has_ranks: bool = False  # kernels that add up over ranks
    generated_weights: tuple[str, ...] = ()  # --load-format, besides a checkpoint


# Alignments: a cache line, and the widest vector register (cpu); a cache line and a row of the
# tensor core's swizzle, where TMA asks for 16 (cuda); what TensorRT aligns its own tensors to.
_ROWS = (
    Backend("cpu", on_gpu=False, kernels="cpu", arena_alignment=64),
    Backend(
        "cuda",
        on_gpu=True,
        kernels="cuda",
        arena_alignment=128,
        packs_linears=True,
        generated_weights=("dummy", "planted"),
    ),
    *(
        Backend(
            name,
            on_gpu=True,
            kernels="cuda",
            arena_alignment=256,
            compiles_plans=True,
            gathers_fp8=False,
            has_block_scales=False,
            cache_types=("paged", "continuous"),
            quantized_kv_cache=("fp8",),
            has_unit_kv_scales=False,
            has_windows_at_run_time=False,
            has_ranks=True,
            generated_weights=("dummy",),
        )
        for name in ("tensorrt", "tensorrt-rtx")
    ),
)
BACKENDS: Mapping[str, Backend] = {row.name: row for row in _ROWS}
