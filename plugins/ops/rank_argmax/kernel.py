"""The best id of each row of logits that ranks have shares of: the binaries, and the launch.

Instead of logits each rank hands on the best of every CHUNK of its ids as a key, whose order is
that of (value, lower id), so what all ranks take is what `sampling.argmax` finds in the gathered
row: 8 bytes for the 4,096 of 1,024 logits (ranks with a device each). The tie between equal logits
goes to the lowest id, as on one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, LaunchEnv
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.all_reduce.kernel import MOST_RANKS, pad_ranks
from llmctl.plugins.ops.all_reduce.peers import (
    MAX_BLOCKS,
    MEETING_KINDS,
    SIZE_KINDS,
    THREADS,
    meeting_values,
    size_values,
)
from llmctl.plugins.ops.rank_argmax.chunks import PEER_CHUNK
from llmctl.plugins.ops.sampling.arrays import CHUNK
from llmctl.plugins.ops.sampling.kernel import AWAITED_WARPS, awaited

if TYPE_CHECKING:
    import torch

_WARPS = THREADS // 32


def kernels(gathering: OpCall) -> list[KernelSpec]:
    """The binaries for the logits that a call of `all_gather` would gather: for ranks on one
    device, and for ranks with a device each."""
    return [_spec(gathering), _peer_spec(gathering)]


def launch(
    gathering: OpCall,
    env: LaunchEnv,
    out: torch.Tensor,
    rows: int,
    *,
    stride: int = 1,
    offset: int = 0,
) -> Launch:
    """out[r * stride + offset] = the best id of row r, -1 if it has NaN; `out` is int32. The same
    on every rank. gathering: whose `x` is a rank's share; it has not been launched."""
    x, vocab = gathering.inputs["x"], gathering.outputs["out"].shape[1]
    if env.peers is not None:
        blocks = min(-(-rows * _peer_chunks(gathering) // _WARPS), MAX_BLOCKS)
        arguments: tuple[torch.Tensor | int, ...] = (
            *meeting_values(gathering, env.peers),
            *(x, out, stride, offset),
            *size_values(gathering, env.peers, rows),
        )
        return Launch(_peer_spec(gathering), (blocks, 1, 1), arguments)
    shares = pad_ranks(env.parts(x, int(gathering.attributes["ranks"])))
    given: tuple[torch.Tensor | int, ...] = (*shares, out, keys_of(gathering, env), stride, offset)
    return Launch(_spec(gathering), (-(-vocab // CHUNK), rows, 1), given)


def keys_of(gathering: OpCall, env: LaunchEnv) -> torch.Tensor:
    """Scratch of ranks on one device: int64 [rows, chunks], zero between launches. Gatherings of
    other shapes (the logits of draft heads) have their own."""
    import torch

    rows, vocab = gathering.outputs["out"].shape
    chunks = -(-vocab // CHUNK)
    return env.scratch(f"rank_argmax.keys.{rows}x{chunks}", (rows, chunks), torch.int64)


def _spec(gathering: OpCall) -> KernelSpec:
    own, vocab = gathering.inputs["x"].shape[1], gathering.outputs["out"].shape[1]
    ranks = int(gathering.attributes["ranks"])
    return KernelSpec(
        name=f"rank_argmax.w{own}.v{vocab}.r{ranks}",
        source="llmctl.plugins.ops.rank_argmax.triton_kernel:rank_argmax",
        arguments=(*["*fp32"] * MOST_RANKS, "*i32", "*i64", "i32", "i32"),
        constants={**awaited(vocab), "OWN": own, "RANKS": ranks, "PDL": True},
        num_warps=AWAITED_WARPS,
    )


def _peer_spec(gathering: OpCall) -> KernelSpec:
    own, vocab = gathering.inputs["x"].shape[1], gathering.outputs["out"].shape[1]
    ranks = int(gathering.attributes["ranks"])
    return KernelSpec(
        name=f"rank_argmax.peers.w{own}.v{vocab}.r{ranks}",
        source="ops/rank_argmax/peers.cu",
        arguments=(*MEETING_KINDS, "*fp32", "*i32", "i32", "i32", *SIZE_KINDS),
        constants={
            "RANKS": ranks,
            "LEAVES": 1,
            "WIDTH": own,
            "OUT_WIDTH": vocab,
            "CHUNK": PEER_CHUNK,
        },
        entry="best_ids",
        num_warps=_WARPS,
    )


def _peer_chunks(gathering: OpCall) -> int:
    return -(-int(gathering.inputs["x"].shape[1]) // PEER_CHUNK)
