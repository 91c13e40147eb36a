"""FP8 weights: divided by largest / 448 in their own dtype and rounded to float8_e4m3fn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmctl.plugins.core.op_spec import FP8_MAX
from llmctl.quantize.maxima import calibrated_maximum
from llmctl.quantize.schemes.writing import ConfigGroup, WeightWriter

if TYPE_CHECKING:
    import torch

# Scale of an all-zero weight, whose FP8 values are zero under any scale. The smallest float16
# subnormal: finite and nonzero in every float dtype, and never the largest of a fused group.
ZERO_WEIGHT_SCALE = 2.0**-24
_NUMBER = {"dynamic": False, "num_bits": 8, "type": "float"}


class Fp8Writer(WeightWriter):
    """E4M3 numbers with one scale per tensor."""

    config_group: ConfigGroup = {
        "input_activations": _NUMBER,
        "weights": _NUMBER,
        "targets": ["Linear"],
    }

    def quantize(self, linear: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        scale = calibrated_maximum(linear.weight_quantizer, name) / FP8_MAX
        if scale == 0:  # all zero, or so small that the scale is not a float32
            scale = scale.new_tensor(ZERO_WEIGHT_SCALE)
        return quantize_weight(linear.weight.detach(), scale), scale

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return weight.float() * scale


def quantize_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight / scale as float8_e4m3fn, saturating at 448. scale is a float32 scalar.

    The division rounds to the weight's own dtype first, as ModelOpt's does. Casting a value above
    464 to float8_e4m3fn is NaN or 448 depending on the device and version, hence the clamp.
    """
    import torch

    return (weight / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
