"""The verification of a round, and how many graphs rounds take.

Verification reads and writes the request state on the device (plugins/device_loop); nothing here
waits. `cuda_rounds.py` decides which rounds are captured as CUDA graphs, and when; the number of
graphs kept, and which are captured before they are needed, is defined here for it and for the
memory plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.plugins.device_loop import tree_kernel
from llmctl.runtime.engines.graphs import MAX_GRAPHS
from llmctl.runtime.generate.synthetic_acceptance import FORCE_LAUNCHES, DeviceAcceptanceDraws
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape

# Besides the operators: preparing the step, drawing from its logits (4), acceptance; or for a level
# of a tree what its rows offer (2) and its growth instead of preparation and acceptance.
LAUNCHES_A_STEP = 7
# Besides those: how each row draws, the moves, and the choice of heads' tokens (2).
LAUNCHES_OF_TREES = 4
# The most tokens of a verification whose graph is captured ahead: larger ones are slow, and such
# draft lengths are rarely the fastest.
AHEAD_TOKENS = 512


def enqueue_verification(
    steps: DeviceSteps, forced: DeviceAcceptanceDraws | None, shape: RoundShape
) -> None:
    """One target step over the root and all drafts, then acceptance; `forced`, if given, decides
    acceptance instead of the target (benchmarks)."""
    target, state, batch = steps.target, steps.state, shape.batch
    program, count = target.program, shape.draft_len + 1
    rows = batch * count
    feed = bookkeeping.verify(state, program.step, program.limits, batch, shape.draft_len)
    steps.launch(target, [feed])
    steps.forward(target, shape, count, rows, is_drawn=True)
    steps.draw(target, state.targets, shape, rows, per_request=count)
    if forced is not None:
        forced.force(state, batch, shape.draft_len)
    steps.launch(target, [bookkeeping.accept(state, batch, shape.draft_len)])


def enqueue_tree_verification(
    steps: DeviceSteps, branches: Callable[[int], bool], shape: RoundShape
) -> None:
    """The same for drafts that may branch, after which the keys of the accepted path are moved to
    the positions of its tokens. Drafts that do not branch run the kernels of chains."""
    target, state, trees = steps.target, steps.state, steps.trees
    assert trees is not None
    program, count = target.program, shape.draft_len + 1
    rows = shape.batch * count
    step, limits = program.step, program.limits
    described = state, trees, step, limits, shape.batch, shape.draft_len
    is_tree = branches(shape.draft_len)
    if is_tree:
        steps.launch(target, [tree_kernel.verify_tree(*described)])
        steps.forward(target, shape, count, rows, tree_len=count, is_drawn=True)
        steps.draw_nodes(trees, shape)
    else:
        feed = bookkeeping.verify(state, step, limits, shape.batch, shape.draft_len)
        steps.launch(target, [feed])
        steps.forward(target, shape, count, rows, is_drawn=True)
        steps.draw(target, state.targets, shape, rows, per_request=count)
    steps.launch(target, [tree_kernel.accept_tree(*described)])
    if is_tree:
        target.enqueue_moves(trees.starts[: shape.batch + 1], trees.moves)


# ---- how many graphs ----

# Tokens of a request that the first step of a draft engine may read: the root, and the last draft
# of a fully accepted round.
MOST_FED = 2


def graphs_kept(num_engines: int) -> int:
    """Graphs of one kind, drafting or verification, that a runner of so many engines keeps besides
    those it captured ahead."""
    return MAX_GRAPHS // min(num_engines, 2)


def ahead_of_need(max_batch_size: int, lengths: Items[int]) -> list[tuple[int, int]]:
    """Batch sizes and draft lengths to capture before the first request: each padded batch size
    with each of `lengths`, up to AHEAD_TOKENS."""
    sizes = {min(1 << power, max_batch_size) for power in range(max_batch_size.bit_length() + 1)}
    sizes -= {0}
    return [
        (batch, length)
        for batch in sorted(sizes)
        for length in lengths
        if length == 0 or batch * (length + 1) <= AHEAD_TOKENS
    ]


def graph_launches(
    num_kernels: int, num_steps: int, num_engines: int, ahead: Iterable[int] = ()
) -> int:
    """The most launches in all graphs that a runner keeps of one engine: steps of up to
    `num_kernels` kernels, `num_steps` of them per graph or as many as `ahead` gives for each graph
    captured ahead, plus those that force acceptance."""
    ahead = list(ahead)
    steps = graphs_kept(num_engines) * num_steps + sum(ahead)
    num_graphs = graphs_kept(num_engines) + len(ahead)
    return steps * (num_kernels + LAUNCHES_A_STEP) + num_graphs * FORCE_LAUNCHES


def head_launches(num_kernels: int, ahead: Iterable[int] = ()) -> int:
    """The most launches that drafts of an engine's own heads add to `graph_launches`: graphs of
    drafting with `num_kernels` kernels, and verification of trees. `ahead`: the graphs captured
    ahead."""
    num_graphs = graphs_kept(1) + len(list(ahead))
    return num_graphs * (num_kernels + LAUNCHES_OF_TREES)
