"""Packed matrix product: unpack, then the reference of `linear`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.linear.reference import linear
from llmctl.plugins.packed_linear.layout import plain_order, restore, unpack
from llmctl.plugins.program import StepInputs


def product(
    inputs: Mapping[str, torch.Tensor], order: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """All rows of `x` times the packed weight, as `dtype` [N, logical rows]."""
    x = inputs["x"]
    weight = restore(unpack(inputs["weight"], len(order), x.shape[1]), order)
    scale, bias = (
        None if role not in inputs else restore(inputs[role], order)
        for role in ("weight_scale", "bias")
    )
    x_scale = inputs.get("x_scale")
    if x_scale is not None and len(x_scale) > 1:
        x_scale = x_scale[: len(x)]
    return linear(x, weight, dtype, scale, x_scale, bias)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Multiply all rows of `x`."""
    out = outputs["out"]
    out[: len(inputs["x"])] = product(inputs, plain_order(out.shape[1]), out.dtype)
