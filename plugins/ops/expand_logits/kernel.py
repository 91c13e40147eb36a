"""Logits of a reduced vocabulary on a GPU: which binaries there are, and how a step launches
them."""

from __future__ import annotations

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
    """One binary per pair of vocabularies."""
    return [_spec(call)[0]]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Place the logits of the first rows of `x`."""
    arguments = (call.inputs["x"], call.inputs["index"], call.outputs["out"])
    return launch_rows(_spec(call), env.count(shape), arguments)


def _spec(call: OpCall) -> tuple[KernelSpec, RowPlan]:
    width, vocab = call.inputs["x"].shape[1], call.outputs["out"].shape[1]
    plan = plan_rows(call, vocab, whole=False)
    spec = KernelSpec(
        name=f"expand_logits.w{width}.v{vocab}",
        source="llmctl.plugins.ops.expand_logits.triton_kernel:expand_logits",
        arguments=("*fp32", "*i32", "*fp32"),
        constants={"WIDTH": width, "VOCAB": vocab, "BLOCK": plan.block, "PDL": True},
        num_warps=plan.num_warps,
    )
    return spec, plan
