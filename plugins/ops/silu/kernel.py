"""SiLU on a GPU: which binaries there are, and how a step launches them."""

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
    """One binary per width and dtype, with and without a residual."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Activate the first rows of `x`."""
    x = call.inputs["x"]
    # A residual that is absent is not read: any tensor of its type stands in.
    arguments = (x, call.inputs.get("residual", x), call.outputs["out"])
    return launch_rows(_spec(call), env.count(shape), arguments)


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x, has_residual = call.inputs["x"], "residual" in call.inputs
    width, kind = x.shape[1], pointer(x.dtype)
    plan = plan_rows(call, width, whole=False)
    spec = KernelSpec(
        name=f"silu.{short_name(x.dtype)}.w{width}{'.residual' if has_residual else ''}",
        source="llmctl.plugins.ops.silu.triton_kernel:silu_residual",
        arguments=(kind, kind, kind),
        constants={
            "WIDTH": width,
            "BLOCK": plan.block,
            "HAS_RESIDUAL": has_residual,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
    return spec, plan
