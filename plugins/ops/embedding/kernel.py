"""Embedding on a GPU: a gather of the table's rows by the token ids on the device."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.gather_rows.kernel import gather, gather_spec


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """The gather kernel for the table's width and dtype."""
    return [gather_spec(call.inputs["weight"])]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """out[n] = weight[token_ids[n]]; ids outside the vocabulary take its nearest row."""
    table, out = call.inputs["weight"], call.outputs["out"]
    return gather(table, env.step.token_ids, out, shape.num_tokens)
