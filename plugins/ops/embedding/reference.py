"""Plain embedding lookup: exact, no arithmetic."""

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
    """out[n] = weight[token_ids[n]]."""
    weight, out = inputs["weight"], outputs["out"]
    ids = torch.from_numpy(step.token_ids).to(weight.device, torch.int64)
    out[: len(ids)] = weight[ids]
