"""SwiGLU on a GPU: which binaries there are, and how a step launches them."""

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
    """One binary per width, dtype and kind of scale."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Activate the first rows of `x`."""
    x, out = call.inputs["x"], call.outputs["out"]
    # An absent role is not accessed: any tensor of its type can be passed.
    scale = call.inputs.get("scale", call.outputs.get("out_scale", x))
    arguments = (x, scale, out, call.outputs.get("out_scale", scale))
    return launch_rows(_spec(call), env.count(shape), arguments)


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x, out = call.inputs["x"], call.outputs["out"]
    inner = out.shape[1]
    plan = plan_rows(call, inner, whole=False)
    scale = pointer(x.dtype) if plan.scaling == "none" else "*fp32"
    spec = KernelSpec(
        name=f"swiglu.{short_name(x.dtype)}.i{inner}.{plan.scaling}",
        source="llmctl.plugins.ops.swiglu.triton_kernel:swiglu",
        arguments=(pointer(x.dtype), scale, pointer(out.dtype), scale),
        constants={
            "INNER": inner,
            "BLOCK": plan.block,
            "STATIC_SCALE": plan.scaling == "static",
            "PER_TOKEN": plan.per_token,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
    return spec, plan
