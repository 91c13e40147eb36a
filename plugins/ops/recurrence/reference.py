"""The recurrence as torch modules round it: the sum, then its activation, to the model dtype."""

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
    """See spec.py."""
    x = inputs["x"]
    count, width = x.shape
    rows = torch.from_numpy(step.logit_rows[:count]).to(x.device, torch.int64)
    state = x
    if "carry" in inputs:
        state = (x.float() + inputs["carry"][rows].float()).to(x.dtype)
    if attributes["silu"]:
        wide = state.float()
        state = (wide / (1 + torch.exp(-wide))).to(x.dtype)
    outputs["state"][:count] = state
    if "out" in outputs:
        outputs["out"][:count, :width] = inputs["context"][rows, :width]
        outputs["out"][:count, width:] = state
