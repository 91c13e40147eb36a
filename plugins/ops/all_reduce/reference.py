"""The sum over ranks: added in one order, scaled, biased and rounded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from llmctl.plugins.core.calls import StepInputs


def add_ranks(partial: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32 tensors of 1, 2, 4 or 8 ranks, added as a balanced tree: (0 + 1) + (2 + 3)."""
    if len(partial) == 1:
        return partial[0]
    half = len(partial) // 2
    return add_ranks(partial[:half]) + add_ranks(partial[half:])


def add_parts(partial: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Those of ranks whose own sums are parts side by side, `width` columns each."""
    return add_ranks([add_ranks(own.chunk(own.shape[1] // width, dim=1)) for own in partial])


def finish(total: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The sum [N, O], scaled and biased, float32."""
    scales = [inputs[role] for role in ("x_scale", "weight_scale") if role in inputs]
    if scales:
        total = total * reduce(torch.mul, scales)
    return total + inputs["bias"].float() if "bias" in inputs else total


def reduce_ranks(
    partial: Sequence[torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
) -> None:
    """All rows of `partial`, which has what `x` is to each rank."""
    out = outputs["out"]
    out[: len(partial[0])] = finish(add_parts(partial, out.shape[1]), inputs).to(out.dtype)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """All rows of `x`, of one rank."""
    assert attributes["ranks"] == 1, "a call has the numbers of one rank"
    reduce_ranks([inputs["x"]], inputs, outputs)
