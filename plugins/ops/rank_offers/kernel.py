"""The likeliest ids of rows of logits that ranks with a GPU each have shares of, of one head or
several: the binary, and the launch.

Beam searches and static trees read the largest of every chunk of a row, and a beam search what a
softmax needs of each. Ranks list these of their own ids and hand the lists on: 8 bytes an entry,
and count + 1 entries for the 4 bytes each of CHUNK logits. `select` and `fill_tree` then read them
as those of one row's chunks, and find the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch, Peers
from llmctl.plugins.ops.all_reduce.peers import (
    MAX_BLOCKS,
    MEETING_KINDS,
    SIZE_KINDS,
    THREADS,
)
from llmctl.plugins.ops.rank_argmax.chunks import PEER_CHUNK

if TYPE_CHECKING:
    import torch

MOST = 64  # ids that may be listed of a chunk
_WARPS = THREADS // 32
_ENTRY_BYTES = 8


def num_chunks(ranks: int, own: int) -> int:
    """Of a row of which each of so many ranks has `own` ids."""
    return ranks * _own_chunks(own)


def given_bytes(own: int, rows: int) -> int:
    """The most that a rank gives of so many rows, of all heads."""
    return rows * _own_chunks(own) * (MOST + 1) * _ENTRY_BYTES


def spec(ranks: int, own: int, vocab: int, *, has_sums: bool) -> KernelSpec:
    """The binary for rows of `vocab` ids, of which each rank has `own`."""
    sums = ("sums", "*fp32") if has_sums else ("keys", "i64")  # of keys alone a null pointer
    return KernelSpec(
        name=f"rank_offers.peers.{sums[0]}.w{own}.v{vocab}.r{ranks}",
        source="ops/rank_offers/peers.cu",
        arguments=(*MEETING_KINDS, "*i64", "*i64", sums[1], "i32", "i32", "i32", *SIZE_KINDS),
        constants={
            "RANKS": ranks,
            "LEAVES": 1,
            "WIDTH": own,
            "OUT_WIDTH": vocab,
            "CHUNK": PEER_CHUNK,
            "MOST": MOST,
        },
        entry="offers",
        num_warps=_WARPS,
    )


@dataclass(frozen=True, slots=True)
class SharedLogits:
    """What a rank has of the logits of heads of `vocab` ids: float32 [rows, own] each, and int64
    [heads] where they lie."""

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    vocab: int
    ranks: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], vocab: int, ranks: int) -> SharedLogits:
        """Of heads of one form."""
        import torch

        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        return cls(tuple(tensors), addresses.to(tensors[0].device), vocab, ranks)

    @property
    def own(self) -> int:
        """Ids of a rank."""
        return self.tensors[0].shape[1]

    @property
    def num_chunks(self) -> int:
        """Of a row of all ranks."""
        return num_chunks(self.ranks, self.own)


def launch(
    logits: SharedLogits,
    peers: Peers,
    keys: torch.Tensor,
    sums: torch.Tensor | None,
    rows: int,
    count: int,
) -> Launch:
    """List the `count` likeliest of each chunk of the first rows of all heads.

    keys: int64 [heads, at least rows * num_chunks * count]; sums: float32 [rows, num_chunks, 2] of
    one head, or None.
    """
    own, ranks, heads = logits.own, logits.ranks, len(logits.tensors)
    assert ranks == peers.num_ranks, "the engine's ranks"
    assert sums is None or heads == 1, "sums are those of one head"
    assert 1 <= count <= MOST, f"{count} ids of a chunk; the kernel lists {MOST}"
    lists = heads * rows * _own_chunks(own)
    assert lists * (count + 1) * _ENTRY_BYTES <= peers.slot_bytes, "a slot holds the largest lists"
    stride = keys.numel() // heads
    assert stride >= rows * num_chunks(ranks, own) * count, "keys hold what is listed"
    blocks = min(-(-lists // _WARPS), MAX_BLOCKS)
    arguments: tuple[torch.Tensor | int, ...] = (
        *(peers.bases, peers.state, peers.lost),
        *(logits.addresses, keys, 0 if sums is None else sums, count, rows, stride),
        *(peers.rank, heads, peers.slot_bytes, peers.limit_ns),
    )
    found = spec(ranks, own, logits.vocab, has_sums=sums is not None)
    return Launch(found, (blocks, 1, 1), arguments)


def _own_chunks(own: int) -> int:
    return -(-own // PEER_CHUNK)
