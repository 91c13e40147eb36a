"""Draws without filters from rows of logits that ranks have shares of: the binaries, and the
launches, for ranks with a device each.

Every rank scans its own share as one rank scans a whole row (`sampling.scan_share`), and hands on
the best that it found: 32 bytes a row instead of its logits. A draw depends on its own id alone
(`plain_draw`), so the best of all ranks is what one rank draws. Filters compare all logits of a row
with each other: their rows are gathered. Ranks on one device gather, too, and draw as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, Peers
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.all_reduce.peers import (
    MAX_BLOCKS,
    MEETING_KINDS,
    SIZE_KINDS,
    THREADS,
    meeting_values,
    size_values,
)
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import CHUNK, DrawnRows, SamplingScratch

if TYPE_CHECKING:
    import torch

_WARPS = THREADS // 32


def kernels(gathering: OpCall) -> list[KernelSpec]:
    """The binaries for the logits that a call of `all_gather` would gather."""
    own, vocab = gathering.inputs["x"].shape[1], gathering.outputs["out"].shape[1]
    return [sampling.scan_spec(own, vocab), _spec(gathering)]


def launches(
    gathering: OpCall,
    peers: Peers,
    out: torch.Tensor,
    scratch: SamplingScratch,
    rows: DrawnRows,
) -> list[Launch]:
    """As `sampling.sample`, of requests without filters; tokens are the same on every rank.
    gathering: whose `x` is a rank's share; it has not been launched."""
    x, vocab = gathering.inputs["x"], gathering.outputs["out"].shape[1]
    scan = sampling.scan_share(x, vocab, peers.rank * x.shape[1], scratch, rows)
    found = (scratch.chunk_keys, scratch.chunk_values, scratch.chunk_rests, scratch.chunk_ids)
    arguments: tuple[torch.Tensor | int, ...] = (
        *meeting_values(gathering, peers),
        *(*found, rows.arrays.greedy, out, rows.per_request, rows.stride, rows.offset),
        *size_values(gathering, peers, rows.count),
    )
    blocks = min(-(-rows.count // _WARPS), MAX_BLOCKS)
    return [scan, Launch(_spec(gathering), (blocks, 1, 1), arguments)]


def _spec(gathering: OpCall) -> KernelSpec:
    own, ranks = gathering.inputs["x"].shape[1], int(gathering.attributes["ranks"])
    return KernelSpec(
        name=f"rank_draw.peers.w{own}.r{ranks}",
        source="ops/rank_draw/peers.cu",
        arguments=(
            *MEETING_KINDS,
            *("*i64", "*fp64", "*fp64", "*i32", "*i32", "*i32", "i32", "i32", "i32"),
            *SIZE_KINDS,
        ),
        constants={"RANKS": ranks, "LEAVES": 1, "CHUNKS": -(-own // CHUNK)},
        entry="best_draws",
        num_warps=_WARPS,
    )
