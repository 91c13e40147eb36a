"""Launches of the bookkeeping of rounds whose drafts are trees.

    list_top(logits, keys, batch, n)                the n largest logits of all heads' rows
    fill_tree(keys, nodes, state, batch, k, n, V)   a static tree's tokens, from all heads'
    verify_tree(state, trees, step, limits, b, k)   the target's step of the roots and their drafts
    spread(state, trees, batch, k)                  how each row of it draws
    accept_tree(state, trees, step, limits, b, k)   what was accepted, and the moves of its keys

Arguments are those of kernel.py; tree_reference.py has the meaning of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, KernelSpec, Launch, StepLimits
from llmctl.plugins.device_loop.kernel import MAX_TILE, ONE_BLOCK, power_of_two, step_arrays
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.sampling.arrays import CHUNK

if TYPE_CHECKING:
    import torch

_TREE = "llmctl.plugins.device_loop.triton_tree"
_FILL = "llmctl.plugins.device_loop.triton_fill"
_BLOCK_ROWS = 128  # of `spread`
MOST_RANKS = 16  # the most tokens of a head that a tree can take


@dataclass(frozen=True, slots=True)
class StaticNodes:
    """Which token of which head each draft of a tree is; int32 [K] on the device."""

    heads: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadLogits:
    """Logits of several heads [rows, vocab] float32, each where its head leaves them."""

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor  # int64 [heads], beside them

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> HeadLogits:
        """Of one vocabulary."""
        import torch

        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
        return cls(tuple(tensors), addresses.to(tensors[0].device))

    @property
    def vocab(self) -> int:
        """Width of the logits."""
        return self.tensors[0].shape[1]


def tree_kernels(
    max_batch_size: int, max_draft_len: int, vocab: int, listed: int | None = None
) -> list[KernelSpec]:
    """The binaries, besides those of chains, of an engine whose heads draft trees. listed: chunks
    of a row that ranks list together, besides those that `list_top` lists."""
    filled = {num_chunks(vocab), listed or num_chunks(vocab)}
    return [
        _list_spec(vocab),
        *(_fill_spec(max_draft_len, vocab, chunks) for chunks in sorted(filled)),
        *round_kernels(max_batch_size, max_draft_len),
    ]


def round_kernels(max_batch_size: int, max_draft_len: int) -> list[KernelSpec]:
    """Those of verification and acceptance alone: for trees that no head drafts."""
    return [
        _feed_spec(max_batch_size, max_draft_len),
        _spread_spec(),
        _accept_spec(max_batch_size, max_draft_len),
    ]


def num_chunks(vocab: int) -> int:
    """Of a row of logits, by `list_top`."""
    return -(-vocab // CHUNK)


def num_keys(max_batch_size: int, chunks: int, count: int) -> int:
    """Entries that lists of so many chunks a row take for one head: an even number, so that each
    head's are aligned to 16 bytes."""
    return -(-max_batch_size * chunks * count // 2) * 2


def list_top(logits: HeadLogits, keys: torch.Tensor, batch: int, count: int) -> Launch:
    """The `count` largest of each row of each head's logits, into `keys` int64 [heads, num_keys]
    of as many heads."""
    vocab, num_heads = logits.vocab, len(logits.addresses)
    arguments = (logits.addresses, keys, keys.shape[1], count)
    return Launch(_list_spec(vocab), (num_chunks(vocab), batch, num_heads), arguments)


def fill_tree(
    keys: torch.Tensor,
    nodes: StaticNodes,
    state: RoundState,
    batch: int,
    draft_len: int,
    count: int,
    vocab: int,
    chunks: int | None = None,
) -> Launch:
    """Drafts of each request from what `list_top` found in each head, with the same `count`; or
    ranks together (`plugins/ops/rank_offers`), in so many chunks of a row."""
    spec = _fill_spec(state.max_draft_len, vocab, chunks or num_chunks(vocab))
    stride = keys.shape[1]
    arguments = (keys, nodes.heads, nodes.ranks, state.drafts, stride, draft_len, count)
    return Launch(spec, (batch, len(keys), 1), arguments)


def verify_tree(
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
) -> Launch:
    """Prepare the target step of the root and up to `draft_len` drafts of each request; logits of
    all."""
    arguments: tuple[torch.Tensor | int, ...] = (
        state.root,
        state.committed,
        state.max_len,
        state.capacity,
        state.drafts,
        trees.parents,
        trees.counts,
        trees.positions,
        *step_arrays(step),
        step.tree_start,
        step.tree_root,
        step.paths,
        batch,
        draft_len,
        limits.max_seq_len,
        limits.tokens_per_block,
        step.block_tables.shape[1],
    )
    spec = _feed_spec(state.max_batch_size, state.max_draft_len)
    return Launch(spec, (batch, 1, 1), arguments)


def spread(state: RoundState, trees: DraftTrees, batch: int, draft_len: int) -> Launch:
    """The sampling parameters of each request, for each of its rows."""
    rows = batch * (draft_len + 1)
    arrays = state.sampling.tensors + trees.sampling.tensors
    arguments: tuple[torch.Tensor | int, ...] = (*arrays, rows, draft_len + 1)
    return Launch(_spread_spec(), (-(-rows // _BLOCK_ROWS), 1, 1), arguments)


def accept_tree(
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
) -> Launch:
    """Follow the drafts that equal `state.targets`, advance the requests, write records to the ring
    and list the moves of the path's keys."""
    arguments = (
        state.root,
        state.previous,
        state.committed,
        state.max_len,
        state.capacity,
        state.drafts,
        trees.parents,
        trees.counts,
        state.targets,
        step.block_tables,
        trees.rows,
        trees.starts,
        trees.moves,
        state.counter,
        state.ring,
        batch,
        draft_len,
        state.ring.shape[0],
        limits.tokens_per_block,
        step.block_tables.shape[1],
    )
    return Launch(_accept_spec(state.max_batch_size, state.max_draft_len), ONE_BLOCK, arguments)


def _list_spec(vocab: int) -> KernelSpec:
    return KernelSpec(
        name=f"rounds.list_top.v{vocab}",
        source=f"{_FILL}:list_top",
        arguments=("*i64", "*i64", "i32", "i32"),
        constants={"VOCAB": vocab, "CHUNK": CHUNK, "PDL": True},
    )


def _fill_spec(max_draft_len: int, vocab: int, chunks: int) -> KernelSpec:
    words = [f"k{max_draft_len}", f"v{vocab}", *[f"c{chunks}"] * (chunks != num_chunks(vocab))]
    return KernelSpec(
        name=".".join(["rounds", "fill_tree", *words]),
        source=f"{_FILL}:fill_tree",
        arguments=("*i64", *("*i32",) * 3, *("i32",) * 3),
        constants={
            "MAX_DRAFT_LEN": max_draft_len,
            "NUM_CHUNKS": chunks,
            "BLOCK_KEYS": power_of_two(chunks * MOST_RANKS),
            "BLOCK_RANKS": MOST_RANKS,
            "BLOCK_NODES": min(power_of_two(max_draft_len), 64),
            "PDL": True,
        },
    )


def _feed_spec(max_batch_size: int, max_draft_len: int) -> KernelSpec:
    return KernelSpec(
        name=f"rounds.feed_tree.b{max_batch_size}.k{max_draft_len}",
        source=f"{_TREE}:feed_tree",
        arguments=("*i32",) * 18 + ("i32",) * 5,
        constants={
            "MAX_DRAFT_LEN": max_draft_len,
            "BLOCK_REQUESTS": power_of_two(max_batch_size),
            "BLOCK_NODES": min(power_of_two(max_draft_len + 1), 256),
            "PDL": True,
        },
    )


def _spread_spec() -> KernelSpec:
    request = ("*fp64", "*i32", "*fp64", "*fp64", *("*i32",) * 4)
    return KernelSpec(
        name="rounds.spread",
        source=f"{_TREE}:spread",
        arguments=(*request, *request, "i32", "i32"),
        constants={"BLOCK_ROWS": _BLOCK_ROWS, "PDL": True},
    )


def _accept_spec(max_batch_size: int, max_draft_len: int) -> KernelSpec:
    block_nodes = power_of_two(max_draft_len + 1)
    block_requests = min(power_of_two(max_batch_size), max(1, MAX_TILE // block_nodes))
    return KernelSpec(
        name=f"rounds.accept_tree.b{max_batch_size}.k{max_draft_len}",
        source=f"{_TREE}:accept_tree",
        arguments=("*i32",) * 15 + ("i32",) * 5,
        constants={
            "MAX_BATCH_SIZE": max_batch_size,
            "MAX_DRAFT_LEN": max_draft_len,
            "BLOCK_REQUESTS": block_requests,
            "BLOCK_NODES": block_nodes,
            "PDL": True,
        },
        num_warps=4 if block_requests * block_nodes < MAX_TILE else 8,  # else registers spill
    )
