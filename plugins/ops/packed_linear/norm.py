"""A packed product that normalizes its tokens, split into rms_norm and the plain product.

Both ways give the same bits, so a step may use either: few tokens are normalized by the product
itself, which saves a kernel in the chain of a step; many by rms_norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from llmctl.plugins.core.calls import OpCall

if TYPE_CHECKING:
    import torch

_ROLES = frozenset({"norm_weight", "residual", "normal", "residual_out"})
_FP8_BYTES = 1


def norm_roles(
    inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and outputs of the rms_norm within a product."""
    normal = outputs["normal"]
    given = {"x": inputs["x"], "weight": inputs["norm_weight"], "residual": inputs["residual"]}
    if normal.element_size() == _FP8_BYTES:
        given["scale"] = inputs["x_scale"]
    made = {"out": normal}
    if "residual_out" in outputs:
        made["residual_out"] = outputs["residual_out"]
    return given, made


def norm_call(call: OpCall) -> OpCall:
    """The rms_norm within a product."""
    given, made = norm_roles(call.inputs, call.outputs)
    return OpCall("rms_norm", call.name, given, made, {"epsilon": call.attributes["epsilon"]})


def product_call(call: OpCall) -> OpCall:
    """The product of rows that are normalized already."""
    inputs = {role: t for role, t in call.inputs.items() if role not in _ROLES}
    inputs["x"] = call.outputs["normal"]
    outputs = {role: t for role, t in call.outputs.items() if role not in _ROLES}
    attributes = {key: value for key, value in call.attributes.items() if key != "epsilon"}
    return replace(call, inputs=inputs, outputs=outputs, attributes=attributes)
