"""The sum in float32, rounded once to the model dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llmctl.plugins.core.calls import StepInputs


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """out = x + residual."""
    x, residual = inputs["x"], inputs["residual"]
    outputs["out"][: len(x)] = (x.float() + residual[: len(x)].float()).to(x.dtype)
