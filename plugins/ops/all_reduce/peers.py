"""What ranks with a GPU each exchange: their buffers (`meeting.cuh`), and the launches of
`peers.cu`, which are sums and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.dtypes import pointer, short_name
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, Peers
from llmctl.plugins.core.calls import OpCall

if TYPE_CHECKING:
    import torch

TURN = 1024  # as in meeting.cuh
THREADS, MAX_BLOCKS = 256, 256  # the former as in peers.cu; two on a multiprocessor
_PAGE = 2 << 20  # bytes
_VECTOR_BYTES = 16  # that a thread moves at once
AFTER_SUM = ("weight_scale", "x_scale", "bias")  # what ends a product
_TYPES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
# What a second hop must save of the bytes that enter a GPU: NVLink moves as many in its time.
_HOP_BYTES = 840_000  # 2.9 us at 290 GB/s (cli/rank_speed.py)
MEETING_KINDS = ("*i64", "*i32", "*i32")  # arguments that begin and end a kernel over ranks
SIZE_KINDS = ("i32", "i32", "i64", "i64")


def buffer_bytes(num_ranks: int, slot_bytes: int) -> int:
    """A rank's buffer: two slots for each sender. In whole pages of a GPU, so that nothing else is
    mapped with it. It is zero before the first launch."""
    return -(-2 * num_ranks * slot_bytes // _PAGE) * _PAGE


def hops_of(ranks: int, rows: int, hidden: int) -> int:
    """1: every rank gets all partial sums. 2: a row's owner gets them and hands on what it makes of
    them. From what all ranks know, so that they agree; and the same for all sums of a step, so that
    an owner may keep what only the next one of them reads. Two ranks would save 1.5 bytes of 4,
    which has not been timed: they take one hop (docs/performance/tensor_parallel.md)."""
    if ranks == 2:
        return 1
    one, two = (entering_bytes(ranks, rows, hidden, hops) for hops in (1, 2))
    return 2 if one - two > _HOP_BYTES else 1


def entering_bytes(ranks: int, rows: int, hidden: int, hops: int) -> float:
    """What enters a GPU: 4 bytes of each partial sum, and of results 1, in FP8."""
    columns = (ranks - 1) * rows * hidden
    return 4.0 * columns if hops == 1 else (4 + 1) * columns / ranks


def optional_kinds(call: OpCall, *roles: str) -> tuple[str, ...]:
    """Argument types; an input or output that the call has not is a null pointer."""
    tensors = {**call.inputs, **call.outputs}
    return tuple(pointer(tensors[role].dtype) if role in tensors else "i64" for role in roles)


def optional_values(call: OpCall, *roles: str) -> tuple[torch.Tensor | int, ...]:
    """Those arguments."""
    tensors = {**call.inputs, **call.outputs}
    return tuple(tensors.get(role, 0) for role in roles)


def meeting_values(call: OpCall, peers: Peers) -> tuple[torch.Tensor, ...]:
    """The first arguments of a kernel over ranks, `MEETING_KINDS`."""
    assert peers.num_ranks == call.attributes["ranks"], "the engine's ranks"
    return (peers.bases, peers.state, peers.lost)


def size_values(call: OpCall, peers: Peers, rows: int) -> tuple[int, ...]:
    """The last arguments of a kernel over ranks that exchanges the first rows of `x`."""
    given = rows * given_columns(call) * call.inputs["x"].itemsize
    assert given <= peers.slot_bytes, "a slot holds the largest step"
    return (peers.rank, rows, peers.slot_bytes, peers.limit_ns)


def leaf_words(call: OpCall) -> list[str]:
    """Of a kernel's name."""
    leaves = int(call.attributes.get("leaves", 1))
    return [f"l{leaves}"] * (leaves > 1)


def given_columns(call: OpCall) -> int:
    """What a rank gives of a row: its own parts are added before."""
    return int(call.inputs["x"].shape[1]) // int(call.attributes.get("leaves", 1))


def peer_spec(call: OpCall) -> KernelSpec:
    """The binary of an operator over ranks; those with the same roles share it."""
    x, out = call.inputs["x"], call.outputs["out"]
    ranks, is_gather = int(call.attributes["ranks"]), call.op == "all_gather"
    name = str(out.dtype).removeprefix("torch.")
    roles = [role for role in AFTER_SUM if role in call.inputs]
    own = given_columns(call)
    words = [call.op, "peers", short_name(out.dtype), f"w{own}", f"w{out.shape[1]}"]
    words += leaf_words(call)
    after = optional_kinds(call, *AFTER_SUM)
    return KernelSpec(
        name=".".join([*words, f"r{ranks}", *roles]),
        source="ops/all_reduce/peers.cu",
        arguments=(*MEETING_KINDS, pointer(x.dtype), *after, pointer(out.dtype), *SIZE_KINDS),
        constants={
            "RANKS": ranks,
            "WIDTH": own,
            "LEAVES": int(call.attributes.get("leaves", 1)),
            "OUT_WIDTH": out.shape[1],
            "GATHER": int(is_gather),
            "OUT_TYPE": _TYPES[name],
        },
        entry="exchange",
        num_warps=THREADS // 32,
    )


def peer_launch(call: OpCall, peers: Peers, rows: int) -> Launch:
    """Exchange the first rows of `x`. The grid is the same on every rank."""
    vectors = rows * given_columns(call) * call.inputs["x"].itemsize // _VECTOR_BYTES
    blocks = min(-(-vectors // THREADS), MAX_BLOCKS)
    arguments = (
        *meeting_values(call, peers),
        *(call.inputs["x"], *optional_values(call, *AFTER_SUM), call.outputs["out"]),
        *size_values(call, peers, rows),
    )
    return Launch(peer_spec(call), (blocks, 1, 1), arguments)
