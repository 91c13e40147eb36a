"""What the kernels of trees do, request by request."""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.device_loop.state import RECORD_TOKENS, RoundState
from llmctl.plugins.device_loop.trees import DraftTrees


def verify_tree(
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
) -> None:
    """The root and the drafts of each request, packed without gaps.

    Draft i is stored i + 1 places behind the root; its position is the root's plus its depth. Rows
    of logits without a node of their own are the root's again (token 0's for padding). Tokens of
    padding follow the last request's, with slot -1.
    """
    width, per_block = draft_len + 1, limits.tokens_per_block
    first = 0
    spare = sum(_num_tokens(state, trees, request, draft_len) for request in range(batch))
    step.cu_q[0] = 0
    for request in range(batch):
        committed, capacity = int(state.committed[request]), int(state.capacity[request])
        count = _num_tokens(state, trees, request, draft_len)
        step.kv_len[request] = min(committed - 1 + count, capacity) if count else 0
        step.tree_start[request] = request * width if count > 1 else -1
        step.tree_root[request] = max(committed - 1, 0)
        for node in range(width):
            row, is_live = request * width + node, node < count
            index = first + node if is_live else spare + node - count
            path = _path_to(trees, request, node) if is_live else [0]
            position = committed - 1 + len(path) - 1
            place = committed - 1 + node
            token = state.drafts[request, node - 1] if node else state.root[request]
            step.token_ids[index] = token if is_live else 0
            step.position_ids[index] = min(position, limits.max_seq_len - 1) if is_live else 0
            step.slot_mapping[index] = -1
            if is_live and place < capacity:
                block = int(step.block_tables[request, place // per_block])
                step.slot_mapping[index] = block * per_block + place % per_block
            if is_live:
                step.paths[row, : len(path)] = torch.tensor(path)
            step.logit_rows[row] = index if is_live else first * bool(count)
            trees.positions[row] = position + 1
        first += count
        spare += width - count
        step.cu_q[request + 1] = first


def spread(state: RoundState, trees: DraftTrees, batch: int, draft_len: int) -> None:
    """Each row draws as its request does."""
    for name in state.sampling.__slots__:
        values = getattr(state.sampling, name)[:batch].repeat_interleave(draft_len + 1)
        getattr(trees.sampling, name)[: len(values)] = values


def accept_tree(
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
) -> None:
    """From the root on, follow the draft that is what the target drew, as far as max_len leaves
    room; the target's token at the end of the path becomes the root.

    Lists the moves that bring the keys of the path to the positions of its tokens. Where siblings
    have one token, the first counts. Rows of padding are zeros.
    """
    record = state.ring[int(state.counter) % len(state.ring)]
    record.zero_()
    moves: list[tuple[int, int]] = []
    for request in range(batch):
        trees.starts[request] = len(moves)
        committed = int(state.committed[request])
        if committed == 0:
            continue
        drawn = state.targets[request * (draft_len + 1) :][: draft_len + 1].tolist()
        count = _num_tokens(state, trees, request, draft_len)
        room = int(state.max_len[request]) - committed - 1
        path, tokens = [0], [int(state.root[request]), drawn[0]]
        while len(path) - 1 < room:
            found = [
                node
                for node in range(1, count)
                if trees.parents[request, node - 1] == path[-1]
                and state.drafts[request, node - 1] == tokens[-1]
            ]
            if not found:
                break
            path.append(found[0])
            tokens.append(drawn[found[0]])
        emitted = tokens[1:]
        row = [committed, path[-1], len(emitted), count - 1, *emitted]
        record[request, : RECORD_TOKENS + len(emitted)] = torch.tensor(row, dtype=torch.int32)
        table, size = step.block_tables[request], limits.tokens_per_block
        for depth, node in enumerate(path):
            if node != depth:
                here, there = (_slot(table, committed - 1 + at, size) for at in (node, depth))
                moves.append((here, there))
        trees.rows[request] = request * (draft_len + 1) + path[-1]
        state.previous[request], state.root[request] = tokens[-2], tokens[-1]
        state.committed[request] = committed + len(emitted)
    trees.starts[batch] = len(moves)
    if moves:
        trees.moves[: len(moves)] = torch.tensor(moves, dtype=torch.int32)
    state.counter.add_(1).bitwise_and_(0x7FFFFFFF)


def fill_tree(
    logits: list[torch.Tensor],
    heads: torch.Tensor,
    ranks: torch.Tensor,
    state: RoundState,
    batch: int,
    draft_len: int,
) -> None:
    """Draft i of each request is the id with rank ranks[i] of head heads[i]: rank 0 is the largest
    logit, of equal ones the lowest id; NaN is the smallest."""
    for request in range(batch):
        for draft in range(draft_len):
            row = logits[int(heads[draft])][request]
            order = torch.where(row.isnan(), -torch.inf, row).argsort(descending=True, stable=True)
            state.drafts[request, draft] = order[int(ranks[draft])]


def _num_tokens(state: RoundState, trees: DraftTrees, request: int, draft_len: int) -> int:
    """Of a request in a round: its root and the drafts that take part; 0 for padding."""
    committed = int(state.committed[request])
    if committed == 0:
        return 0
    room = min(int(state.max_len[request]) - 1, int(state.capacity[request])) - committed
    return 1 + max(0, min(draft_len, int(trees.counts[request]), room))


def _path_to(trees: DraftTrees, request: int, node: int) -> list[int]:
    """Nodes from the root down."""
    path = [node]
    while path[0]:
        path.insert(0, int(trees.parents[request, path[0] - 1]))
    return path


def _slot(table: torch.Tensor, position: int, tokens_per_block: int) -> int:
    block, offset = divmod(position, tokens_per_block)
    return int(table[block]) * tokens_per_block + offset
