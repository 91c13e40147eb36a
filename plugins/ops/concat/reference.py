"""Plain concatenation: exact, no arithmetic."""

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
    """out[n] = x[n], y[n]."""
    count = len(inputs["x"])
    outputs["out"][:count] = torch.cat((inputs["x"], inputs["y"][:count]), dim=-1)
