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
    x, state = call.inputs["x"], call.outputs["state"]
    context, carry = (call.inputs.get(role, x) for role in ("context", "carry"))
    out = call.outputs.get("out", state)  # nor is what is absent read or written
    arguments = (x, context, carry, env.step.logit_rows, out, state)
    before = call.inputs.get("context", carry)  # rows that may be continued
    return launch_rows(_spec(call), env.count(shape), (*arguments, len(before)))


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    x, context = call.inputs["x"], call.inputs.get("context")
    width, kind = x.shape[1], pointer(x.dtype)
    context_width = 0 if context is None else context.shape[1]
    has_carry, is_activated = "carry" in call.inputs, bool(call.attributes["silu"])
    plan = plan_rows(call, width, whole=False)
    parts = ["recurrence", short_name(x.dtype), f"w{width}", f"c{context_width}"]
    parts += ["carry"] * has_carry + ["silu"] * is_activated
    spec = KernelSpec(
        name=".".join(parts),
        source="llmctl.plugins.ops.recurrence.triton_kernel:recurrence",
        arguments=(kind, kind, kind, "*i32", kind, kind, "i32"),
        constants={
            "WIDTH": width,
            "CONTEXT_WIDTH": context_width,
            "BLOCK": plan.block,
            "HAS_CARRY": has_carry,
            "SILU": is_activated,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
    return spec, plan
