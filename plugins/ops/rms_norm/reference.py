"""RMS normalization as Hugging Face Llama rounds it, with residual addition and quantization.

The sum of x and the residual is rounded to the model dtype, the normalized row is rounded before
it meets the weight, and the product is rounded again; everything between is float32. Checked
against transformers' LlamaRMSNorm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.quantize.reference import write_output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., H], weight [H] -> x / rms(x) * weight in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (weight.float() * (wide * scale).to(x.dtype).float()).to(x.dtype)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """Normalize all rows of `x` (+ `residual`); `residual_out` may be `residual` itself."""
    add_and_normalize(inputs, outputs, float(attributes["epsilon"]))


def add_and_normalize(
    inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], epsilon: float
) -> None:
    """The same, which needs no step."""
    x = inputs["x"]
    if "residual" in inputs:
        x = (x.float() + inputs["residual"][: len(x)].float()).to(x.dtype)
    if "residual_out" in outputs:
        outputs["residual_out"][: len(x)] = x
    y = rms_norm(x, inputs["weight"], epsilon)
    write_output(y, inputs, outputs)
