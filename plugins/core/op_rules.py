"""What specs ask of a call beyond roles, dtypes and shapes: each rule says what is wrong, or None.

A kernel relies on these as it does on shapes. A tensor is whatever has a dtype of torch's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.schemes.table import FORMS, find_form

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

    Rule = Callable[[OpCall], str | None]

RANK_COUNTS = (1, 2, 4, 8)  # of ranks, and of leaves: sums are balanced trees over them
LEAF_MULTIPLE = 16  # columns of a leaf: lanes of the cpu's vectors
# Types with scales: E4M3, and codes of packed weights.
QUANTIZED = (FP8, *(form.dtype for form in FORMS.values() if form.is_coded))


def name_of(tensor: Any) -> str:
    """torch's name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def scales_output(out: str, *scales: str) -> Rule:
    """A quantized output has exactly one of these scales, any other has none."""

    def rule(call: OpCall) -> str | None:
        given = [role for role in scales if role in call.inputs or role in call.outputs]
        dtype = name_of(call.outputs[out])
        if len(given) == (dtype in QUANTIZED):
            return None
        return f"{out} is {dtype} with {len(given)} of the scales {', '.join(scales)}"

    return rule


def scales_input(value: str, scale: str) -> Rule:
    """An input has a scale if it is quantized, and none otherwise."""

    def rule(call: OpCall) -> str | None:
        dtype = name_of(call.inputs[value])
        if (scale in call.inputs) == (dtype in QUANTIZED):
            return None
        return f"{value} is {dtype} {'with' if scale in call.inputs else 'without'} {scale}"

    return rule


def together(*names: str) -> Rule:
    """All of these roles and attributes are there, or none."""

    def rule(call: OpCall) -> str | None:
        known = (*call.inputs, *call.outputs, *call.attributes)
        missing = [name for name in names if name not in known]
        if len(missing) in (0, len(names)):
            return None
        return f"has no {missing[0]!r}, which goes with {', '.join(n for n in names if n in known)}"

    return rule


def within(attribute: str, low: float, high: float) -> Rule:
    """An attribute, where it is given, lies in [low, high]; NaN does not."""

    def rule(call: OpCall) -> str | None:
        value = call.attributes.get(attribute, low)
        if isinstance(value, int | float) and math.isfinite(value) and low <= value <= high:
            return None
        return f"attribute {attribute} is {value!r}; it must be from {low} to {high}"

    return rule


def sound_heads(call: OpCall) -> str | None:
    """There are heads, and the halves of one rotate together."""
    heads, kv_heads, size = _heads(call)
    if heads > 0 and kv_heads > 0 and size > 0 and size % 2 == 0:
        return None
    return (
        f"has {heads} heads and {kv_heads} key and value heads of size {size}; the size must be "
        "even"
    )


def even_groups(call: OpCall) -> str | None:
    """Heads divide evenly over key and value heads."""
    heads, kv_heads, _ = _heads(call)
    if kv_heads > 0 and heads % kv_heads == 0:
        return None
    return f"has {heads} heads over {kv_heads} key and value heads; they must divide evenly"


def _heads(call: OpCall) -> list[int]:
    return [int(call.attributes[name]) for name in ("num_heads", "num_kv_heads", "head_size")]


def partial_sums(*scaled: str) -> Rule:
    """A product over a part of K gives float32 sums; scales and bias come after the sum over
    ranks. Any other has a scale for each of the operands `scaled` that is quantized."""

    def rule(call: OpCall) -> str | None:
        if call.attributes.get("is_partial", False):
            return _unfinished(call)
        broken = (scales_input(value, f"{value}_scale")(call) for value in scaled)
        return next(filter(None, broken), None)

    return rule


def _unfinished(call: OpCall) -> str | None:
    beyond = [role for role in ("weight_scale", "x_scale", "bias") if role in call.inputs]
    if not beyond and name_of(call.outputs["out"]) == "float32":
        return None
    return f"has partial sums in {name_of(call.outputs['out'])} with {', '.join(beyond) or 'none'}"


def whole_leaves(call: OpCall) -> str | None:
    """K divides into leaves that are whole vectors of the kernel."""
    leaves, inner = int(call.attributes.get("leaves", 1)), int(call.inputs["x"].shape[1])
    if leaves in RANK_COUNTS and (leaves == 1 or inner % (leaves * LEAF_MULTIPLE) == 0):
        return None
    return f"has {leaves} leaves over {inner} columns; multiples of {LEAF_MULTIPLE} are wanted"


def known_ranks(call: OpCall) -> str | None:
    """As many ranks as there may be, and parts of a rank's sum."""
    counts = ", ".join(map(str, RANK_COUNTS))
    for name in ("ranks", "leaves"):
        count = call.attributes.get(name, 1)
        if count not in RANK_COUNTS:
            return f"is over {count!r} {name}; one of {counts} is wanted"
    return None


def columns_of_leaves(width: str) -> Callable[[Mapping[str, int]], int]:
    """The columns of an input that has one `width` after the other, of each part of a sum."""
    return lambda dims: dims[width] * dims.get("leaves", 1)


def packed_operands(call: OpCall) -> str | None:
    """The tokens of a packed weight have the dtype of the weight's numbers."""
    weight = name_of(call.inputs["weight"])
    wanted = find_form(weight, call.attributes).numbers
    side, role = (call.outputs, "normal") if "normal" in call.outputs else (call.inputs, "x")
    found = name_of(side[role])
    if found != wanted:
        return f"{role} is {found}; {wanted} meets a packed weight of {weight}"
    is_partial = call.attributes.get("is_partial", False)  # scaled after the sum over ranks
    if not is_partial and ("x_scale" in call.inputs) != (wanted in QUANTIZED):
        return f"{role} is {found} {'with' if 'x_scale' in call.inputs else 'without'} x_scale"
    return None


NORM_LIMITS = within("epsilon", 0.0, 1.0)
# What attention and the write before it share; the cache's own layers are the plan's to know.
HEAD_RULES: tuple[Rule, ...] = (
    sound_heads,
    within("layer", 0, 10_000),
    together("k_scale", "v_scale"),
)
