"""Packed matrix product: rms_norm where it has one, unpack, then the reference of `linear`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.linear.reference import linear
from llmctl.plugins.ops.packed_linear.layout import numbers_of, plain_order, restore
from llmctl.plugins.ops.packed_linear.norm import norm_roles
from llmctl.plugins.ops.rms_norm.reference import add_and_normalize
from llmctl.plugins.schemes.table import find_form


def product(
    inputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    order: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """All rows of `x` times the packed weight, as `dtype` [N, logical rows]."""
    x, packed = inputs["x"], inputs["weight"]
    form = find_form(str(packed.dtype).removeprefix("torch."), attributes)
    weight = restore(numbers_of(packed, len(order), x.shape[1], form), order)
    scale, bias = (
        None if role not in inputs else restore(inputs[role], order)
        for role in ("weight_scale", "bias")
    )
    x_scale = inputs.get("x_scale")
    if x_scale is not None and len(x_scale) > 1:
        x_scale = x_scale[: len(x)]
    return linear(x, weight, dtype, scale, x_scale, bias)


def normalized(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
) -> Mapping[str, torch.Tensor]:
    """The inputs with `x` as the product reads it; writes `normal` and `residual_out`."""
    if "norm_weight" not in inputs:
        return inputs
    add_and_normalize(*norm_roles(inputs, outputs), float(attributes["epsilon"]))
    return {**inputs, "x": outputs["normal"][: len(inputs["x"])]}


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Multiply all rows of `x`, normalized if there is a norm."""
    inputs = normalized(inputs, outputs, attributes)
    out, leaves = outputs["out"], int(attributes.get("leaves", 1))
    given = zip(inputs["x"].chunk(leaves, 1), inputs["weight"].chunk(leaves, 0), strict=True)
    order = plain_order(out.shape[1] // leaves)
    apart = [
        product({**inputs, "x": x, "weight": weight}, attributes, order, out.dtype)
        for x, weight in given
    ]
    out[: len(inputs["x"])] = torch.cat(apart, dim=1)
