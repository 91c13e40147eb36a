"""Launches of trees that grow in rounds, level by level.

    offer(logits, arrays, rows, ...)   what rows of a step offer (two launches)
    grow(arrays, state, trees, ...)    trees with that, and the step that computes the next level
    list_moves(arrays, state, ...)     of the keys of an accepted path, in the cache of what drafts

`reference.py` has the meaning of each; runtime/drafting/growth/ does the same on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, KernelSpec, Launch, StepLimits
from llmctl.plugins.device_loop.kernel import ONE_BLOCK, power_of_two, step_arrays
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.sampling.arrays import CHUNK
from llmctl.plugins.ops.tree_growth.arrays import (
    MOST_OFFERS,
    MOST_WIDTH,
    GrowthArrays,
    most_nodes,
)

if TYPE_CHECKING:
    import torch

_OFFER = "llmctl.plugins.ops.tree_growth.triton_offer"
_SOURCE = "llmctl.plugins.ops.tree_growth.triton_kernel"
_TILE = 32  # candidates that all others are compared with at a time


def kernels(limits: StepLimits, vocab_size: int) -> list[KernelSpec]:
    """The binaries of an engine whose steps, or whose head's, draft the trees."""
    return [
        _offer_spec(vocab_size),
        _pick_spec(vocab_size),
        _grow_spec(limits),
        _moves_spec(limits),
    ]


def offer(
    logits: torch.Tensor, arrays: GrowthArrays, rows: int, *, is_root: bool, num_ids: int
) -> list[Launch]:
    """The likeliest of the first `num_ids` tokens, by each of the requests' rows of logits
    [rows, vocab] float32: those of their roots, or of the drafts that are followed."""
    vocab = logits.shape[1]
    chunks, count = -(-num_ids // CHUNK), arrays.shape.num_offers
    where = arrays.roots if is_root else arrays.rows
    listed = (logits, where, arrays.keys, arrays.sums, num_ids, count)
    picked = (arrays.keys, arrays.sums, arrays.ids, arrays.values, chunks, count)
    return [
        Launch(_offer_spec(vocab), (chunks, rows, 1), listed),
        Launch(_pick_spec(vocab), (rows, 1, 1), picked),
    ]


def grow(
    arrays: GrowthArrays,
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
    level: int,
    *,
    of_pairs: bool,
) -> Launch:
    """Trees of up to draft_len drafts with what the rows of `level` offer (0: the roots'). If there
    is a further level, `step` is the one that computes it: a token and a row of logits for each
    draft that may be followed. of_pairs: of a head, of whose pairs there is one
    less than there are tokens for `state.committed`, and which leaves logits of every token."""
    shape = arrays.shape
    arguments: tuple[torch.Tensor | int, ...] = (
        state.committed,
        state.max_len,
        state.capacity,
        state.sampling.greedy,
        state.drafts,
        trees.parents,
        trees.counts,
        arrays.scores,
        arrays.places,
        arrays.kinds,
        arrays.frontier,
        arrays.children,
        arrays.ends,
        arrays.drawn,
        arrays.ids,
        arrays.values,
        arrays.rows if level else arrays.roots,
        arrays.rows,
        arrays.sources,
        arrays.ranking,
        arrays.notes,
        *step_arrays(step),
        step.tree_start,
        step.tree_root,
        step.paths,
        batch,
        level,
        shape.levels(draft_len),
        draft_len,
        shape.num_offers,
        shape.width,
        state.max_draft_len,
        arrays.ranking.shape[1],
        int(of_pairs),
        int(shape.given is not None),
        limits.max_seq_len,
        limits.tokens_per_block,
        step.block_tables.shape[1],
        step.paths.shape[1],
    )
    return Launch(_grow_spec(limits), (batch, 1, 1), arguments)


def list_moves(
    arrays: GrowthArrays,
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
) -> Launch:
    """After acceptance: `starts` and `moves` bring the keys of each accepted path from their places
    to the positions of its tokens, in the cache of `step`."""
    arguments = (
        trees.rows,
        trees.parents,
        arrays.places,
        state.committed,
        state.capacity,
        step.block_tables,
        arrays.starts,
        arrays.moves,
        batch,
        draft_len,
        state.max_draft_len,
        limits.tokens_per_block,
        step.block_tables.shape[1],
    )
    return Launch(_moves_spec(limits), ONE_BLOCK, arguments)


def _offer_spec(vocab_size: int) -> KernelSpec:
    return KernelSpec(
        name=f"growth.offer.v{vocab_size}",
        source=f"{_OFFER}:offer",
        arguments=("*fp32", "*i32", "*i64", "*fp32", "i32", "i32"),
        constants={"VOCAB": vocab_size, "CHUNK": CHUNK, "PDL": True},
    )


def _pick_spec(vocab_size: int) -> KernelSpec:
    num_chunks = -(-vocab_size // CHUNK)
    return KernelSpec(
        name=f"growth.pick.v{vocab_size}",
        source=f"{_OFFER}:pick",
        arguments=("*i64", "*fp32", "*i32", "*fp32", "i32", "i32"),
        constants={
            "BLOCK_CHUNKS": power_of_two(num_chunks),
            "BLOCK_KEYS": power_of_two(num_chunks * MOST_OFFERS),
            "PDL": True,
        },
    )


def _grow_spec(limits: StepLimits) -> KernelSpec:
    most = most_nodes(limits)
    return KernelSpec(
        name=f"growth.grow.b{limits.max_batch_size}.k{limits.max_draft_len}",
        source=f"{_SOURCE}:grow",
        arguments=(
            *("*i32",) * 7,
            "*fp64",
            *("*i32",) * 7,
            "*fp32",
            *("*i32",) * 3,
            "*fp64",
            *("*i32",) * 11,
            *("i32",) * 14,
        ),
        constants={
            "BLOCK": power_of_two(most + MOST_OFFERS * MOST_WIDTH),
            "BLOCK_NODES": power_of_two(most + 1),
            "BLOCK_WIDTH": MOST_WIDTH,
            "BLOCK_REQUESTS": power_of_two(limits.max_batch_size),
            "TILE": _TILE,
            "PDL": True,
        },
        num_warps=8,
    )


def _moves_spec(limits: StepLimits) -> KernelSpec:
    return KernelSpec(
        name=f"growth.list_moves.b{limits.max_batch_size}",
        source=f"{_SOURCE}:list_moves",
        arguments=("*i32",) * 8 + ("i32",) * 5,
        constants={"BLOCK_REQUESTS": power_of_two(limits.max_batch_size), "PDL": True},
    )
