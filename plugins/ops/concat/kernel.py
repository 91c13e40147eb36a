"""Concatenation on a GPU: which binaries there are, and how a step launches them."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.quantize.kernel import RowPlan, launch_rows, plan_rows


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per pair of widths and dtype."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Join the first rows of `x` and `y`."""
    arguments = (call.inputs["x"], call.inputs["y"], call.outputs["out"])
    return launch_rows(_spec(call), env.count(shape), arguments)


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x, y = call.inputs["x"], call.inputs["y"]
    kind = pointer(x.dtype)
    plan = plan_rows(call, x.shape[1] + y.shape[1], whole=False)
    spec = KernelSpec(
        name=f"concat.{short_name(x.dtype)}.w{x.shape[1]}.w{y.shape[1]}",
        source="llmctl.plugins.ops.concat.triton_kernel:concat",
        arguments=(kind, kind, kind),
        constants={
            "WIDTH": x.shape[1],
            "OTHER_WIDTH": y.shape[1],
            "BLOCK": plan.block,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
    return spec, plan
