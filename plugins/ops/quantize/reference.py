"""FP8 E4M3 quantization: divide in float32, clamp to +-448, round to nearest even.

A scale is a dequantization multiplier (real = fp8 * scale). Static scales come from calibration;
per-token scales are max|row| / 448, and 1 for a row of zeros. NaN stays NaN. Checked against
torch's own float8_e4m3fn cast.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.op_spec import FP8_MAX, INT8_MAX


def quantize_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., K] any float dtype, scale [1] float32 -> float8_e4m3fn of the same shape."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., K] any float dtype, scale [1] float32 -> int8 of the same shape, NaN to 0: what a
    quantized KV cache holds. Symmetric: -128 is not used."""
    whole = (x.float() / scale).clamp(-INT8_MAX, INT8_MAX).round()
    return whole.nan_to_num(0.0).to(torch.int8)


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] -> (float8_e4m3fn [N, K], float32 scale [N])."""
    largest = x.float().abs().amax(dim=-1)
    scale = torch.where(largest == 0, 1.0, largest / FP8_MAX)
    return quantize_static(x, scale[:, None]), scale


def write_output(
    y: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> None:
    """Store y [N, K] as the operator's `out`: as it is, or quantized when a scale role says so."""
    count = len(y)
    if "out_scale" in outputs:
        quantized, scale = quantize_per_token(y)
        outputs["out"][:count] = quantized
        outputs["out_scale"][:count] = scale
    elif "scale" in inputs:
        outputs["out"][:count] = quantize_static(y, inputs["scale"])
    else:
        outputs["out"][:count] = y


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Quantize all rows of `x`."""
    write_output(inputs["x"], inputs, outputs)
