"""The recurrence on a GPU: which binaries there are, and how a step launches them."""

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
    """One binary per width and dtype, form of the sum and width of the context."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """The states of the first rows of `x`."""
    x, context = call.inputs["x"], call.inputs["context"]
    carry = call.inputs.get("carry", x)  # not read where it is absent
    arguments = (x, context, carry, env.step.logit_rows, call.outputs["out"], call.outputs["state"])
    return launch_rows(_spec(call), env.count(shape), (*arguments, len(context)))


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x, context = call.inputs["x"], call.inputs["context"]
    width, kind = x.shape[1], pointer(x.dtype)
    has_carry, is_activated = "carry" in call.inputs, bool(call.attributes["silu"])
    plan = plan_rows(call, width, whole=False)
    parts = ["recurrence", short_name(x.dtype), f"w{width}", f"c{context.shape[1]}"]
    parts += ["carry"] * has_carry + ["silu"] * is_activated
    spec = KernelSpec(
        name=".".join(parts),
        source="llmctl.plugins.ops.recurrence.triton_kernel:recurrence",
        arguments=(kind, kind, kind, "*i32", kind, kind, "i32"),
        constants={
            "WIDTH": width,
            "CONTEXT_WIDTH": context.shape[1],
            "BLOCK": plan.block,
            "HAS_CARRY": has_carry,
            "SILU": is_activated,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
    return spec, plan
