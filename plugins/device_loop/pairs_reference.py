"""What a head that attends reads after a round, request by request.

Pair i is what the target computed for token i, and token i + 1 (runtime/drafting/eagle/pairs.py).
A verification has computed its rows from the root on, and the target has drawn what follows each:

    rows of the verification    r  d1 d2 d3        d1 accepted, then x
    the target's draws          d1 x  .  .
    pairs                      (r d1) (d1 x)

So every row makes a pair with the target's draw there, in the row's own place; that of the last
accepted draft is the last one. Those behind it are of tokens that were not accepted: they are
written over by the pairs of drafts, before anything sees them.

Of a tree only the rows of the accepted path are read, one after another.
"""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.tree_reference import _path_to, _slot
from llmctl.plugins.device_loop.trees import DraftTrees


def read_pairs(
    state: RoundState,
    pairs: RoundState,
    verified: DeviceStep,
    step: DeviceStep,
    batch: int,
    draft_len: int,
) -> None:
    """Describe the step that reads them, after acceptance; its rows are the last pairs.

    verified: the step of the verification. pairs: the state as a head sees it, with a pair less
    than there are tokens for `committed`, which is brought up to date.
    """
    count = draft_len + 1
    real = [b for b in range(batch) if state.committed[b] > 0]
    padding = [b for b in range(batch) if state.committed[b] == 0]
    tokens = batch * count
    for place, request in enumerate(real + padding):
        first, committed, accepted = place * count, int(state.committed[request]), 0
        step.token_ids[first : first + count] = 0
        if place < len(real):
            drawn = state.targets[request * count : (request + 1) * count]
            step.token_ids[first : first + count] = drawn
            accepted = committed - 2 - int(verified.position_ids[first])
        step.logit_rows[request] = first + accepted
        pairs.committed[request] = max(committed - 1, 0)
    step.position_ids[:tokens] = verified.position_ids[:tokens]
    step.slot_mapping[:tokens] = verified.slot_mapping[:tokens]
    step.cu_q[: batch + 1] = verified.cu_q[: batch + 1]
    step.kv_len[:batch] = verified.kv_len[:batch]


def read_path(
    state: RoundState,
    pairs: RoundState,
    trees: DraftTrees,
    verified: DeviceStep,
    step: DeviceStep,
    limits: StepLimits,
    sources: torch.Tensor,
    batch: int,
    draft_len: int,
    depth: int,
) -> None:
    """Describe the step that reads them, after acceptance: pairs of real requests without gaps, of
    each up to depth + 1; its rows are the last pairs. sources: which row of the verification each
    pair's feature is in.
    """
    count = depth + 1
    for tensor, padding in ((step.token_ids, 0), (step.position_ids, 0), (step.slot_mapping, -1)):
        tensor[: batch * count] = padding
    sources[: batch * count] = 0
    step.cu_q[0] = 0
    first = 0
    for request in range(batch):
        committed, capacity = int(state.committed[request]), int(state.capacity[request])
        path: list[int] = []
        if committed:
            path = _path_to(trees, request, int(trees.rows[request]) - request * (draft_len + 1))
        root = committed - 1 - len(path)
        for at, node in enumerate(path):
            step.token_ids[first + at] = state.targets[request * (draft_len + 1) + node]
            step.position_ids[first + at] = min(root + at, limits.max_seq_len - 1)
            sources[first + at] = verified.cu_q[request] + node
            if root + at < capacity:
                slot = _slot(step.block_tables[request], root + at, limits.tokens_per_block)
                step.slot_mapping[first + at] = slot
        first += len(path)
        pairs.committed[request] = max(committed - 1, 0)
        step.logit_rows[request] = first - 1 if path else 0
        step.kv_len[request] = min(committed - 1, capacity) if path else 0
        step.cu_q[request + 1] = first
