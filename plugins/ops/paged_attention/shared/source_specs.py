"""What the binaries of every attention kernel have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import Constant, StepLimits
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.shared.tiles import MOST_UNIT, UNIT

if TYPE_CHECKING:
    import torch

    from llmctl.plugins.core.calls import OpCall

SHORT = 17  # tokens of a request that counts as short: verification of 16 drafts
_TYPES = {"bfloat16": "BF16", "float16": "FP16", FP8: "E4M3", "int8": "INT8"}


def group_size(call: OpCall) -> int:
    """Query heads for each KV head."""
    return int(call.attributes["num_heads"]) // int(call.attributes["num_kv_heads"])


def most_short_tokens(limits: StepLimits, *, has_trees: bool = False) -> int:
    """The most tokens of a short request, or of a tree, in any step of an engine."""
    if has_trees:  # and of whoever is in a step with one
        return max(SHORT, limits.max_draft_len + 1)
    return min(SHORT, limits.max_num_tokens)


def tensor_types(call: OpCall, limits: StepLimits) -> tuple[str, ...]:
    """The types of the tensors that every kernel reads and writes, its first arguments."""
    return (
        pointer(call.inputs["q"].dtype),
        *["*fp32"] * 3,
        pointer(call.outputs["out"].dtype),
        pointer(limits.kv_dtype),
        *["*i32"] * 4,
    )


def source_variant(call: OpCall, limits: StepLimits) -> tuple[list[str], dict[str, Constant]]:
    """What tells binaries of one CUDA source apart: the parts of a name, and the macros."""
    size, heads = int(call.attributes["head_size"]), int(call.attributes["num_kv_heads"])
    q, out = _name(call.inputs["q"]), _name(call.outputs["out"])
    scaled = [role for role in ("k_scale", "v_scale", "out_scale") if role in call.inputs]
    words = [short_name(q), f"kv_{short_name(limits.kv_dtype)}"]
    words += [f"h{heads}x{group_size(call)}", f"d{size}", f"page{limits.tokens_per_block}", *scaled]
    return words, {
        "MODEL_TYPE": _TYPES[q],
        "KV_TYPE": _TYPES[limits.kv_dtype],
        "OUT_TYPE": _TYPES[out],
        "HEADS": heads,
        "GROUP": group_size(call),
        "SIZE": size,
        "TOKENS_PER_BLOCK": limits.tokens_per_block,
        "UNIT": UNIT,
        "MOST_UNIT": MOST_UNIT,
        "K_SCALE": "k_scale" in scaled,
        "V_SCALE": "v_scale" in scaled,
        "STATIC": "out_scale" in scaled,
    }


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
