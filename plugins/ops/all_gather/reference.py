"""Columns of all ranks side by side: a copy without the padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llmctl.plugins.core.calls import StepInputs


def gather_ranks(shares: Sequence[torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """All rows of `shares`, which has what `x` is to each rank."""
    out = outputs["out"]
    out[: len(shares[0])] = torch.cat(list(shares), dim=1)[:, : out.shape[1]]


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """All rows of `x`, of one rank."""
    assert attributes["ranks"] == 1, "a call has the columns of one rank"
    gather_ranks([inputs["x"]], outputs)
