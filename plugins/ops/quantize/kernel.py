"""Quantization on a GPU: which binaries there are, and how a step launches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

if TYPE_CHECKING:
    import torch

_BLOCK = 1024  # columns of a thread block where rows need not stay whole


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How a row-wise operator that may quantize cuts its rows."""

    scaling: str  # "none", "static" or "per_token"
    block: int  # columns of a thread block
    num_blocks: int  # thread blocks of a row
    num_warps: int

    @property
    def per_token(self) -> bool:
        """True where a thread block needs the whole row, for its scale."""
        return self.scaling == "per_token"


def scaling_of(call: OpCall) -> str:
    """How a call stores its output: as it is, or quantized with which kind of scale."""
    if "out_scale" in call.outputs:
        return "per_token"
    return "static" if "scale" in call.inputs else "none"


def plan_rows(call: OpCall, width: int, *, whole: bool) -> RowPlan:
    """Rows of `width` output columns; `whole` where one thread block must see all of them.

    8 elements a thread are one 16-byte load; rows over 8192 take more elements a thread.
    """
    scaling = scaling_of(call)
    block = power_of_two(width)
    if not (whole or scaling == "per_token"):
        block = min(block, _BLOCK)
    num_warps = min(max(block // 256, 1), 32)
    return RowPlan(scaling, block, -(-width // block), num_warps)


def launch_rows(
    planned: tuple[KernelSpec, RowPlan], rows: int, arguments: Sequence[torch.Tensor | int]
) -> list[Launch]:
    """A row-wise operator over the first rows; nothing where there are none."""
    spec, plan = planned
    return [Launch(spec, (rows, plan.num_blocks, 1), tuple(arguments))] if rows else []


def power_of_two(count: int) -> int:
    """The smallest power of two >= count."""
    return 1 << max(0, count - 1).bit_length()


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per width, dtype and kind of scale."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Quantize the first rows of `x`."""
    out = call.outputs["out"]
    # An absent role is not read: any tensor of its type can be passed.
    scales = call.inputs.get("scale", call.outputs.get("out_scale"))
    out_scales = call.outputs.get("out_scale", scales)
    assert scales is not None and out_scales is not None, f"{call.name} has no scale"
    arguments = (call.inputs["x"], scales, out, out_scales)
    return launch_rows(_spec(call), env.count(shape), arguments)


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x = call.inputs["x"]
    width = x.shape[1]
    plan = plan_rows(call, width, whole=False)
    spec = KernelSpec(
        name=f"quantize.{short_name(x.dtype)}.w{width}.{plan.scaling}",
        source="llmctl.plugins.ops.quantize.triton_kernel:quantize",
        arguments=(pointer(x.dtype), "*fp32", pointer(call.outputs["out"].dtype), "*fp32"),
        constants={"WIDTH": width, "BLOCK": plan.block, "PER_TOKEN": plan.per_token, "PDL": True},
        num_warps=plan.num_warps,
    )
    return spec, plan
