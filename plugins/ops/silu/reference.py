"""SiLU as torch.nn.SiLU rounds it: to the model dtype, before a residual is added."""

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
    """out = x / (1 + exp(-x)), plus the residual if there is one."""
    x = inputs["x"]
    wide = x.float()
    out = (wide / (1 + torch.exp(-wide))).to(x.dtype)
    if "residual" in inputs:
        out = (out.float() + inputs["residual"].float()).to(x.dtype)
    outputs["out"][: len(out)] = out
