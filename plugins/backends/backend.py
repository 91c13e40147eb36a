"""The table of backends: what each can do, for the builder, the runtime and the command line.

To add one: a folder in this package, a row here, and a function that opens its engines
(runtime/engines).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmctl.plugins.backends.cuda.arch import HOPPER, RTX_CAPABILITIES
from llmctl.plugins.core.op_rules import RANK_COUNTS
from llmctl.plugins.schemes.table import FP8, MXFP4, PLAIN


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to execute a plan, and what it supports."""

    name: str
    on_gpu: bool
    kernels: str  # the backend whose kernels run its operators: the first part of their tactics
    arena_alignment: int  # bytes
    capabilities: tuple[str, ...] | None = None  # of the GPUs that it serves; None: it names none
    compiles_plans: bool = False  # TensorRT: the network is split into TensorRT plans
    packs_linears: bool = False  # products read weights packed for the tensor core
    gathers_fp8: bool = True
    weight_schemes: tuple[str, ...] = (PLAIN.name, FP8.name, MXFP4.name)  # that have products
    cache_types: tuple[str, ...] = ("paged",)
    quantized_kv_cache: tuple[str, ...] = ("fp8", "int8")
    has_unit_kv_scales: bool = True
    has_windows_at_run_time: bool = True
    rank_counts: tuple[int, ...] | None = (1,)  # how many ranks may share a model; None: any
    has_leaves: bool = False  # sums over K as a tree, of which ranks have subtrees
    continues_trees: bool = False  # trees that are computed over several steps
    generated_weights: tuple[str, ...] = ()  # --load-format, besides a checkpoint


# Alignments: a cache line, and the widest vector register (cpu); a cache line and a row of the
# tensor core's swizzle, where TMA asks for 16 (cuda); what TensorRT aligns its own tensors to.
_ROWS = (
    Backend(
        "cpu",
        on_gpu=False,
        kernels="cpu",
        arena_alignment=64,
        rank_counts=RANK_COUNTS,
        has_leaves=True,
        continues_trees=True,
    ),
    Backend(
        "cuda",
        on_gpu=True,
        kernels="cuda",
        arena_alignment=128,
        capabilities=(HOPPER.capability,),
        packs_linears=True,
        rank_counts=RANK_COUNTS,
        has_leaves=True,
        continues_trees=True,
        generated_weights=("dummy", "planted"),
    ),
    *(
        Backend(
            name,
            on_gpu=True,
            kernels="cuda",
            arena_alignment=256,
            capabilities=capabilities,
            compiles_plans=True,
            gathers_fp8=False,
            weight_schemes=(PLAIN.name, FP8.name),
            cache_types=("paged", "continuous"),
            quantized_kv_cache=("fp8",),
            has_unit_kv_scales=False,
            has_windows_at_run_time=False,
            rank_counts=None,
            generated_weights=("dummy",),
        )
        for name, capabilities in (("tensorrt", None), ("tensorrt-rtx", RTX_CAPABILITIES))
    ),
)
BACKENDS: Mapping[str, Backend] = {row.name: row for row in _ROWS}
