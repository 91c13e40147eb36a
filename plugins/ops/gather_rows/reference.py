"""Plain row gather: exact, no arithmetic."""

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
    """out[r] = x[logit_rows[r]]."""
    x, out = inputs["x"], outputs["out"]
    rows = torch.from_numpy(step.logit_rows).to(x.device, torch.int64)
    out[: len(rows)] = x[rows]
