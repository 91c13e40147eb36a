"""Matrix product in float32, scaled, biased and rounded once.

Checked against torch.nn.functional.linear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [N, K] times weight [O, K], transposed, as `dtype` [N, O].

    weight_scale [O] and x_scale ([1], or [N] per token) are float32 dequantization multipliers.
    """
    y = x.float() @ weight.float().T
    if weight_scale is not None and x_scale is not None:
        y = y * (x_scale.reshape(-1, 1) * weight_scale)
    elif weight_scale is not None:
        y = y * weight_scale
    elif x_scale is not None:
        y = y * x_scale.reshape(-1, 1)
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Multiply all rows of `x`."""
    x, out = inputs["x"], outputs["out"]
    x_scale = inputs.get("x_scale")
    if x_scale is not None and len(x_scale) > 1:
        x_scale = x_scale[: len(x)]
    out[: len(x)] = linear(
        x, inputs["weight"], out.dtype, inputs.get("weight_scale"), x_scale, inputs.get("bias")
    )
