"""What ranks with a GPU each exchange, sums and columns: binaries and launches of `peers.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv, Peers
from llmctl.plugins.core.calls import OpCall

if TYPE_CHECKING:
    import torch

THREADS, MAX_BLOCKS = 256, 128  # as in peers.cu
_PAGE = 2 << 20  # bytes
_VECTOR = 4  # numbers that a thread moves at once
_AFTER = ("weight_scale", "x_scale", "bias")
_TYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


def flag_bytes(num_ranks: int) -> int:
    """Of a rank's buffer, before its slots."""
    return 2 * num_ranks * MAX_BLOCKS * 4


def buffer_bytes(num_ranks: int, slot_bytes: int) -> int:
    """A rank's buffer: flags, and two slots for each sender. In whole pages of a GPU, so that
    nothing else is mapped with it."""
    needed = flag_bytes(num_ranks) + 2 * num_ranks * slot_bytes
    return -(-needed // _PAGE) * _PAGE


def peer_spec(call: OpCall) -> KernelSpec:
    """The binary of an operator over ranks; those with the same roles share it."""
    x, out = call.inputs["x"], call.outputs["out"]
    ranks, is_gather = int(call.attributes["ranks"]), call.op == "all_gather"
    name = str(out.dtype).removeprefix("torch.")

    def optional(role: str) -> str:
        return pointer(call.inputs[role].dtype) if role in call.inputs else "i64"

    roles = [role for role in _AFTER if role in call.inputs]
    words = [call.op, "peers", short_name(out.dtype), f"w{x.shape[1]}", f"w{out.shape[1]}"]
    return KernelSpec(
        name=".".join([*words, f"r{ranks}", *roles]),
        source="ops/all_reduce/peers.cu",
        arguments=(
            *("*i64", "*i32", "*i32", "*fp32", *map(optional, _AFTER), pointer(out.dtype)),
            *("i32", "i32", "i64", "i64"),
        ),
        constants={
            "RANKS": ranks,
            "WIDTH": x.shape[1],
            "OUT_WIDTH": out.shape[1],
            "GATHER": int(is_gather),
            "OUT_TYPE": _TYPES[name],
        },
        entry="exchange",
        num_warps=THREADS // 32,
    )


def peer_launch(call: OpCall, env: LaunchEnv, peers: Peers, rows: int) -> Launch:
    """Exchange the first rows of `x`. The grid is the same on every rank."""
    x = call.inputs["x"]
    assert peers.num_ranks == call.attributes["ranks"], "the engine's ranks"
    assert rows * x.shape[1] * 4 <= peers.slot_bytes, "a slot holds the largest step"
    after: list[torch.Tensor | int] = [call.inputs.get(role, 0) for role in _AFTER]
    vectors = rows * x.shape[1] // _VECTOR
    blocks = min(-(-vectors // THREADS), MAX_BLOCKS)
    arguments = (
        *(peers.bases, peers.state, peers.lost, x, *after, call.outputs["out"]),
        *(peers.rank, rows, peers.slot_bytes, peers.limit_ns),
    )
    return Launch(peer_spec(call), (blocks, 1, 1), arguments)
