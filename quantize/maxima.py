"""The largest values that ModelOpt measured, and the check that they are finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmctl.errors import BadTensorValue

if TYPE_CHECKING:
    import torch


def calibrated_maximum(quantizer: Any, name: str) -> torch.Tensor:
    """The calibrated maximum of one per-tensor quantizer, float32 []. Raises BadTensorValue."""
    found: torch.Tensor | None = quantizer.amax
    assert found is not None and found.numel() == 1, f"{name}: not one calibrated maximum"
    amax = found.detach().float().reshape(())
    require_finite(amax, amax, f"the largest activation at {name}")
    return amax


def require_finite(low: torch.Tensor, high: torch.Tensor, what: str) -> None:
    """Raise BadTensorValue where the extremes of some values are not finite."""
    if not (low.isfinite() and high.isfinite()):
        raise BadTensorValue(
            f"{what}: NaN or infinity among the values (least {float(low)}, largest {float(high)})",
            fix="fetch the checkpoint again; if it was cast to float16, use --dtype bfloat16",
        )
