"""Sum of two activations on a GPU: which binaries there are, and how a step launches them."""

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
    """One binary per width and dtype."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Add the first rows."""
    arguments = (call.inputs["x"], call.inputs["residual"], call.outputs["out"])
    return launch_rows(_spec(call), env.count(shape), arguments)


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x = call.inputs["x"]
    width, kind = x.shape[1], pointer(x.dtype)
    plan = plan_rows(call, width, whole=False)
    spec = KernelSpec(
        name=f"add.{short_name(x.dtype)}.w{width}",
        source="llmctl.plugins.ops.add.triton_kernel:add",
        arguments=(kind, kind, kind),
        constants={"WIDTH": width, "BLOCK": plan.block, "PDL": True},
        num_warps=plan.num_warps,
    )
    return spec, plan
