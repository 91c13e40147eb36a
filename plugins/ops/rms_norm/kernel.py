"""RMS normalization on a GPU: which binaries there are, and how a step launches them."""

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
from llmctl.plugins.ops.quantize.kernel import plan_rows

OWN_ROLES = frozenset({"weight", "scale"})


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per width, dtype and set of roles."""
    return [_spec(call)]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Normalize the first rows of `x`; `residual_out` may be `residual` itself."""
    rows = env.count(shape)
    if rows == 0:
        return []
    weight = call.inputs["weight"]
    out = call.outputs["out"]
    # An absent role is not accessed: any tensor of its type can be passed.
    some_scale = call.outputs.get("out_scale", call.inputs.get("scale"))
    arguments = (
        call.inputs["x"],
        weight,
        call.inputs.get("residual", weight),
        call.inputs.get("scale", some_scale if some_scale is not None else weight),
        out,
        call.outputs.get("residual_out", weight),
        some_scale if some_scale is not None else weight,
        float(call.attributes["epsilon"]),
    )
    return [Launch(_spec(call), (rows, 1, 1), arguments)]


def _spec(call: OpCall) -> KernelSpec:
    x = call.inputs["x"]
    hidden = x.shape[1]
    plan = plan_rows(call, hidden, whole=True)
    has_residual, has_residual_out = "residual" in call.inputs, "residual_out" in call.outputs
    kind = pointer(x.dtype)
    scale = kind if plan.scaling == "none" else "*fp32"
    variant = [short_name(x.dtype), f"h{hidden}", plan.scaling]
    variant += ["residual"] * has_residual + ["residual_out"] * has_residual_out
    return KernelSpec(
        name=".".join(["rms_norm", *variant]),
        source="llmctl.plugins.ops.rms_norm.triton_kernel:rms_norm",
        arguments=(
            *(kind, kind, kind, scale),
            *(pointer(call.outputs["out"].dtype), kind, scale, "fp32"),
        ),
        constants={
            "HIDDEN": hidden,
            "BLOCK": plan.block,
            "HAS_RESIDUAL": has_residual,
            "HAS_RESIDUAL_OUT": has_residual_out,
            "STATIC_SCALE": plan.scaling == "static",
            "PER_TOKEN": plan.per_token,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
