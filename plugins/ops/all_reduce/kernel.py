"""The sum over ranks on a GPU: which binaries there are, and how a step launches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import (
    KernelSpec,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.op_rules import RANK_COUNTS
from llmctl.plugins.ops.all_reduce.peers import leaf_words, peer_launch, peer_spec
from llmctl.plugins.ops.quantize.kernel import power_of_two

if TYPE_CHECKING:
    import torch

MOST_RANKS = RANK_COUNTS[-1]
_BLOCK = 1024  # columns of a thread block
_AFTER = ("weight_scale", "x_scale", "bias")


def kernels(call: OpCall, limits: StepLimits) -> list[KernelSpec]:
    """One binary per width, dtype, number of ranks and set of roles, for ranks on one device, and
    one for ranks with a device each."""
    own = [peer_spec(call)] if int(call.attributes["ranks"]) > 1 else []
    return [_spec(call), *own]


def launches(call: OpCall, env: LaunchEnv, shape: StepShape) -> list[Launch]:
    """Add the first rows of what `x` is to each rank."""
    rows = env.count(shape)
    if rows == 0:
        return []
    if env.peers is not None:
        return [peer_launch(call, env.peers, rows)]
    x, out = call.inputs["x"], call.outputs["out"]
    spec = _spec(call)
    # An absent role or rank is not read: any tensor of its type can be passed.
    scales = [call.inputs.get(role, x) for role in ("weight_scale", "x_scale")]
    parts = pad_ranks(env.parts(x, int(call.attributes["ranks"])))
    given: list[torch.Tensor | int] = [*parts, *scales, call.inputs.get("bias", out), out, 0]
    grid = (rows, -(-out.shape[1] // int(spec.constants["BLOCK"])), 1)
    return [Launch(spec, grid, tuple(given))]


def pad_ranks(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As many as the kernel has arguments; those behind the ranks are not read."""
    return parts + parts[:1] * (MOST_RANKS - len(parts))


def _spec(call: OpCall) -> KernelSpec:
    out, ranks = call.outputs["out"], int(call.attributes["ranks"])
    width, kind = out.shape[1], pointer(out.dtype)
    block = min(power_of_two(width), _BLOCK)
    has = {role: role in call.inputs for role in _AFTER}
    leaves = int(call.attributes.get("leaves", 1))
    words = [short_name(out.dtype), f"w{width}", f"r{ranks}", *leaf_words(call)]
    return KernelSpec(
        name=".".join(["all_reduce", *words, *(role for role in _AFTER if has[role])]),
        source="llmctl.plugins.ops.all_reduce.triton_kernel:all_reduce",
        arguments=(*["*fp32"] * MOST_RANKS, "*fp32", "*fp32", kind, kind, "i32"),
        constants={
            "WIDTH": width,
            "BLOCK": block,
            "RANKS": ranks,
            "LEAVES": leaves,
            **{f"HAS_{role.upper()}": given for role, given in has.items()},
            "PDL": True,
        },
        num_warps=max(block // 256, 1),
    )
