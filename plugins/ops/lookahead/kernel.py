"""The launch of lookahead decoding on a GPU.

    look_ahead(state, trees, arrays, batch, k)   take in the last round, and draft the next one

What it does is what `Lookahead.learn` and `Lookahead.propose` do on the host
(runtime/drafting/lookahead/drafter.py): tests compare every tree and every pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.lookahead.arrays import LookaheadArrays, LookaheadSizes
from llmctl.plugins.ops.quantize.kernel import power_of_two

if TYPE_CHECKING:
    import torch


def kernels(sizes: LookaheadSizes, max_draft_len: int) -> list[KernelSpec]:
    """Every binary of requests of up to these sizes."""
    return [_spec(sizes, max_draft_len)]


def look_ahead(
    state: RoundState, trees: DraftTrees, arrays: LookaheadArrays, batch: int, draft_len: int
) -> Launch:
    """Windows and pools take in what the target drew in the last round (`state.targets`), if that
    was one of drafts; then the trees of the next round, of up to `draft_len` drafts each. Writes
    `state.drafts`, parents and counts."""
    arguments: tuple[torch.Tensor | int, ...] = (
        state.root,
        state.previous,
        state.committed,
        state.max_len,
        state.capacity,
        state.drafts,
        state.targets,
        state.counter,
        trees.parents,
        trees.counts,
        trees.rows,
        *arrays.tensors,
        draft_len,
    )
    return Launch(_spec(arrays.sizes, state.max_draft_len), (batch, 1, 1), arguments)


def _spec(sizes: LookaheadSizes, max_draft_len: int) -> KernelSpec:
    block_nodes = power_of_two(max_draft_len)
    return KernelSpec(
        name=f"lookahead.w{sizes.window}.n{sizes.ngram}.g{sizes.guesses}.k{max_draft_len}",
        source="llmctl.plugins.ops.lookahead.triton_kernel:look_ahead",
        arguments=("*i32",) * 18 + ("i32",),
        constants={
            "MAX_DRAFT_LEN": max_draft_len,
            "MAX_WINDOW": sizes.window,
            "MAX_LAST": sizes.last,
            "ROW_WIDTH": sizes.row_width,
            "BLOCK_NODES": block_nodes,
            "BLOCK_WINDOW": power_of_two(sizes.window * sizes.last),
            "BLOCK_COLUMNS": power_of_two(sizes.window),
            "BLOCK_GUESSES": power_of_two(max(sizes.guesses, 1)),
            "BLOCK_LAST": power_of_two(sizes.last),
            "PDL": True,
        },
        # One warp adds up over its lanes without a barrier, and it does little else.
        num_warps=1 if block_nodes <= 256 else 4,
    )
