"""Columns by index: exact, no arithmetic."""

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
    x, index = inputs["x"], inputs["index"].long()
    is_column = (index >= 0) & (index < x.shape[1])
    taken = x[:, index.clamp(0, x.shape[1] - 1)]
    outputs["out"][: len(x)] = taken.masked_fill(~is_column, float("-inf"))
