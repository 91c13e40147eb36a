"""The binaries of the Triton attention kernels."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.dtypes import short_name
from llmctl.plugins.backends.cuda.kernel_spec import Constant, KernelSpec, StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.batch.batch import covers_batch
from llmctl.plugins.ops.paged_attention.chunk.chunk import covers_chunks
from llmctl.plugins.ops.paged_attention.shared.source_specs import (
    group_size,
    most_short_tokens,
    tensor_types,
)
from llmctl.plugins.ops.paged_attention.verification.verification import choose_variant

ROWS = 64  # generation: rows of a thread block, one tensor-core instruction high
_MERGED_ROWS = 4  # rows that one pass of a merge takes
NO_WINDOW = 1 << 30  # tokens that a row may look back where there is no window
_MIN_REQUESTS = 64  # context: with fewer the compiler takes more registers than there are
_GENERATION = "llmctl.plugins.ops.paged_attention.triton.generation"
_CONTEXT = "llmctl.plugins.ops.paged_attention.triton.context"


def split_spec(call: OpCall, limits: StepLimits, has_trees: bool = False) -> KernelSpec:
    """Requests of few tokens, whose keys are split over thread blocks; chains alone, or trees too
    (one binary for every window)."""
    names, constants = _variant(call, limits, has_trees)
    return KernelSpec(
        name=".".join(["paged_attention.generation", *names] + ["trees"] * has_trees),
        source=f"{_GENERATION}:generation",
        arguments=(
            *tensor_types(call, limits),
            *(*["*i32"] * 3, "*fp32", "*fp32", "*i32"),
            "fp32",
            *["i32"] * (5 + len(window_arguments(call, has_trees))),
        ),
        constants={
            **constants,
            "ROWS": ROWS,
            "MERGED_ROWS": _MERGED_ROWS,
            "AHEAD": 0 if has_trees else _ahead(call, limits),
            "HAS_TREES": has_trees,
        },
        num_warps=4,
        num_stages=1,
        unused_on="" if has_trees or not _is_replaced(call, limits) else HOPPER.capability,
    )


def _is_replaced(call: OpCall, limits: StepLimits) -> bool:
    """Whether verification.cu takes every step of short chains on Hopper: the largest, and then all
    smaller ones."""
    if not covers_batch(call, limits):
        return False
    largest = limits.max_batch_size, most_short_tokens(limits), limits.max_seq_len
    return choose_variant(call, limits, *largest) is not None


def _ahead(call: OpCall, limits: StepLimits) -> int:
    """What the generation kernel loads ahead: as much as leaves no register in local memory."""
    if int(call.attributes["head_size"]) == 64:
        return 2
    return 1 if limits.kv_dtype == FP8 else 0


def context_spec(call: OpCall, limits: StepLimits) -> KernelSpec:
    """Chunks of context, and any other request."""
    names, constants = _variant(call, limits)
    requests = max(_MIN_REQUESTS, 1 << (limits.max_batch_size - 1).bit_length())
    return KernelSpec(
        name=".".join(["paged_attention.context", *names, f"b{requests}"]),
        source=f"{_CONTEXT}:context",
        arguments=(
            *tensor_types(call, limits),
            "fp32",
            *["i32"] * (3 + len(window_arguments(call))),
        ),
        constants={**constants, "ROWS": context_rows(call), "MAX_REQUESTS": requests},
        num_warps=context_rows(call) // 16,
        num_stages=2,
        unused_on=HOPPER.capability if covers_chunks(call, limits) else "",  # by chunk.cu's
    )


def _variant(
    call: OpCall, limits: StepLimits, takes_window: bool = False
) -> tuple[list[str], dict[str, Constant]]:
    """What tells both kernels' binaries apart: the parts of a name, and the constants."""
    size, window = int(call.attributes["head_size"]), int(call.attributes["window"])
    is_asked = bool(window_arguments(call, takes_window))
    constants: dict[str, Constant] = {} if is_asked else {"REACH": window, "SINKS": 0}
    heads, group = int(call.attributes["num_kv_heads"]), group_size(call)
    scaled = [role for role in ("k_scale", "v_scale", "out_scale") if role in call.inputs]
    names = [short_name(call.inputs["q"].dtype), f"kv_{short_name(limits.kv_dtype)}"]
    names += [f"h{heads}x{group}", f"d{size}", f"page{limits.tokens_per_block}", *scaled]
    names += ["windows"] if is_asked else [f"window{window}"] * (window > 0)
    return names, {
        "HEADS": heads,
        "GROUP": group,
        "SIZE": size,
        "WIDTH": 64 if size == 64 else 128,
        "TOKENS_PER_BLOCK": limits.tokens_per_block,
        **constants,
        "HAS_WINDOW": window > 0 or takes_window,
        "HAS_SINKS": is_asked,
        "K_SCALE": "k_scale" in scaled,
        "V_SCALE": "v_scale" in scaled,
        "STATIC": "out_scale" in scaled,
        "PDL": True,
    }


def context_rows(call: OpCall) -> int:
    """Rows of a context thread block: what measured best on an H200."""
    return 64 if int(call.attributes["head_size"]) == 64 else 128


def window_arguments(call: OpCall, always: bool = False) -> tuple[int, ...]:
    """The arguments REACH and SINKS; none where they are constants, unless `always` is asked."""
    if "sink_tokens" not in call.attributes and not always:
        return ()
    window, sinks = int(call.attributes["window"]), int(call.attributes.get("sink_tokens", 0))
    return (window - sinks, sinks) if window > 0 else (NO_WINDOW, 0)
