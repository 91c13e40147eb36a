"""Embedding with its norm on a GPU: which binaries there are, and how a step launches them."""

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


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per width, dtype and kind of scale."""
    return [_spec(call)]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """A row for each token; ids outside the vocabulary take its nearest row."""
    if shape.num_tokens == 0:
        return []
    table, weight, out = call.inputs["weight"], call.inputs["norm_weight"], call.outputs["out"]
    # An absent role is not accessed: any tensor of its type can be passed.
    scale = call.inputs.get("scale", call.outputs.get("out_scale", weight))
    arguments = (
        table,
        env.step.token_ids,
        weight,
        scale,
        call.outputs["embedded"],
        out,
        call.outputs.get("out_scale", scale),
        table.shape[0],
        float(call.attributes["epsilon"]),
    )
    return [Launch(_spec(call), (shape.num_tokens, 1, 1), arguments)]


def _spec(call: OpCall) -> KernelSpec:
    table = call.inputs["weight"]
    hidden = table.shape[1]
    plan = plan_rows(call, hidden, whole=True)
    kind = pointer(table.dtype)
    scale = kind if plan.scaling == "none" else "*fp32"
    return KernelSpec(
        name=f"embedding_norm.{short_name(table.dtype)}.h{hidden}.{plan.scaling}",
        source="llmctl.plugins.fused.embedding_norm.triton_kernel:embedding_norm",
        arguments=(
            *(kind, "*i32", kind, scale, kind),
            *(pointer(call.outputs["out"].dtype), scale, "i32", "fp32"),
        ),
        constants={
            "HIDDEN": hidden,
            "BLOCK": plan.block,
            "STATIC_SCALE": plan.scaling == "static",
            "PER_TOKEN": plan.per_token,
            "PDL": True,
        },
        num_warps=plan.num_warps,
    )
