"""Gathering columns on a GPU: which binaries there are, and how a step launches them.

A step gathers no logits of which the best id of each row, a draw without filters or the likeliest
ids are all that is wanted (`plugins/ops/rank_argmax`, `rank_draw`, `rank_offers`).
"""

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
from llmctl.plugins.ops.all_reduce.kernel import MOST_RANKS, pad_ranks
from llmctl.plugins.ops.all_reduce.peers import peer_launch, peer_spec
from llmctl.plugins.ops.quantize.kernel import power_of_two
from llmctl.plugins.ops.rank_argmax import kernel as rank_argmax
from llmctl.plugins.ops.rank_draw import kernel as rank_draw

_BLOCK = 1024  # columns of a thread block


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per pair of widths, dtype and number of ranks, for ranks on one device, and one
    for ranks with a device each; of logits those of `rank_argmax` and `rank_draw`, too."""
    if int(call.attributes["ranks"]) == 1:
        return [_spec(call)]
    own = [_spec(call), peer_spec(call)]
    if call.attributes.get("to_all", False):
        return own
    return [*own, *rank_argmax.kernels(call), *rank_draw.kernels(call)]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Copy the first rows of what `x` is to each rank."""
    rows, to_all = env.count(shape), bool(call.attributes.get("to_all", False))
    if rows == 0 or (shape.best_only and not to_all):
        return []
    if env.peers is not None:
        return [peer_launch(call, env.peers, rows)]
    if not to_all:
        rank_argmax.keys_of(call, env)  # here, so that the memory plan has it
    x, out = call.inputs["x"], call.outputs["out"]
    spec = _spec(call)
    arguments = (*pad_ranks(env.parts(x, int(call.attributes["ranks"]))), out)
    return [Launch(spec, (rows, -(-out.shape[1] // int(spec.constants["BLOCK"])), 1), arguments)]


def _spec(call: OpCall) -> KernelSpec:
    out = call.outputs["out"]
    own, width = call.inputs["x"].shape[1], out.shape[1]
    ranks = int(call.attributes["ranks"])
    block, kind = min(power_of_two(width), _BLOCK), short_name(out.dtype)
    words = ["all_gather", *([] if kind == "fp32" else [kind]), f"w{own}", f"w{width}", f"r{ranks}"]
    return KernelSpec(
        name=".".join(words),
        source="llmctl.plugins.ops.all_gather.triton_kernel:all_gather",
        arguments=(pointer(out.dtype),) * (MOST_RANKS + 1),
        constants={"OWN": own, "WIDTH": width, "BLOCK": block, "RANKS": ranks, "PDL": True},
        num_warps=max(block // 256, 1),
    )
