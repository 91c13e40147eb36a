"""The sum over ranks, then rms_norm of it and the residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.fused.all_reduce_norm.parts import norm_roles
from llmctl.plugins.ops.all_reduce.reference import add_parts, finish
from llmctl.plugins.ops.rms_norm.reference import add_and_normalize


def reduce_and_normalize(
    partial: Sequence[torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    epsilon: float,
) -> None:
    """All rows of `partial`, which has what `x` is to each rank."""
    residual = inputs["residual"]
    total = finish(add_parts(partial, residual.shape[1]), inputs).to(residual.dtype)
    add_and_normalize(norm_roles(inputs, total), outputs, epsilon)


def reference(
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | float | str | bool],
    step: StepInputs,
    kv_cache: torch.Tensor,
) -> None:
    """All rows of `x`, of one rank."""
    assert attributes["ranks"] == 1, "a call has the numbers of one rank"
    reduce_and_normalize([inputs["x"]], inputs, outputs, float(attributes["epsilon"]))
