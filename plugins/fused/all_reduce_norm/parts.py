"""The two operators that it consists of, as calls of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.all_reduce.peers import AFTER_SUM

if TYPE_CHECKING:
    import torch


def sum_call(call: OpCall, total: torch.Tensor) -> OpCall:
    """The sum over ranks, which writes `total`."""
    inputs = {role: t for role, t in call.inputs.items() if role == "x" or role in AFTER_SUM}
    of_sum = ("ranks", "leaves")
    attributes = {name: call.attributes[name] for name in of_sum if name in call.attributes}
    return OpCall("all_reduce", call.name, inputs, {"out": total}, attributes)


def norm_call(call: OpCall, total: torch.Tensor) -> OpCall:
    """The norm, which reads it."""
    inputs = norm_roles(call.inputs, total)
    return OpCall(
        "rms_norm", call.name, inputs, call.outputs, {"epsilon": call.attributes["epsilon"]}
    )


def norm_roles(inputs: Mapping[str, torch.Tensor], total: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs of the norm."""
    given = {"x": total, "weight": inputs["norm_weight"], "residual": inputs["residual"]}
    return given | ({"scale": inputs["scale"]} if "scale" in inputs else {})
