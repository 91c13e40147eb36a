"""Row gather on a GPU: which binaries there are, and how a step launches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.quantize.kernel import power_of_two

if TYPE_CHECKING:
    import torch

_BLOCK = 1024  # columns of a thread block: one 16-byte load for each of 128 threads


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per width and dtype."""
    return [gather_spec(call.inputs["x"])]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """out[r] = x[logit_rows[r]]."""
    return gather(call.inputs["x"], env.step.logit_rows, call.outputs["out"], shape.num_rows)


def gather(
    source: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, count: int, beside: int = 1
) -> list[Launch]:
    """Copy `count` rows of `source` [N, W]; `rows` is int32 on the device. beside: how many such
    rows are side by side in one of the tensor that `out` is a part of."""
    if count == 0:
        return []
    num_rows, width = source.shape
    spec = gather_spec(source)
    grid = (count, -(-width // int(spec.constants["BLOCK"])), 1)
    return [Launch(spec, grid, (source, rows, out, num_rows, beside))]


def gather_spec(source: torch.Tensor) -> KernelSpec:
    """The binary that gathers rows of such a tensor."""
    width = source.shape[1]
    return KernelSpec(
        name=f"gather.{short_name(source.dtype)}.w{width}",
        source="llmctl.plugins.ops.gather_rows.triton_kernel:gather",
        arguments=(pointer(source.dtype), "*i32", pointer(source.dtype), "i32", "i32"),
        constants={"WIDTH": width, "BLOCK": min(_BLOCK, power_of_two(width)), "PDL": True},
    )
