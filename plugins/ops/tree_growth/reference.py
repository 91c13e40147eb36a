"""What the kernels of trees that grow do, request by request."""

from __future__ import annotations

import math

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.plugins.ops.tree_growth.arrays import GrowthArrays

_LARGE = 1e38  # logits are cut to it; what is smaller is not offered


def offer(
    logits: torch.Tensor, arrays: GrowthArrays, rows: int, *, is_root: bool, num_ids: int
) -> None:
    """The likeliest tokens of each row, the likeliest first, with their log-probabilities; -inf for
    what is no number, or where there are fewer."""
    where = (arrays.roots if is_root else arrays.rows)[:rows].long()
    found = logits[where, :num_ids].nan_to_num(-_LARGE).clamp(-_LARGE, _LARGE)
    count = min(arrays.shape.num_offers, num_ids)
    ids, values = top_log_probs(found, count)
    is_offered = found.gather(1, ids) > -_LARGE / 2
    arrays.ids[:rows] = 0
    arrays.values[:rows] = -torch.inf
    arrays.ids[:rows, :count] = torch.where(is_offered, ids, 0).int()
    arrays.values[:rows, :count] = torch.where(is_offered, values, -torch.inf)


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
) -> None:
    """Of the drafts so far and what the rows of `level` offer, the best are kept, draft_len or as
    many as the request's blocks and its max_len have room for, in the order in which they were
    offered: a row after the other, the likeliest first. Of equal ones the earlier is better. Of a
    tree that is given its nodes are kept, whatever their scores. Requests that are sampled have a
    chain of what they drew.

    Of the new ones the best are followed, `width` of them; nobody follows the id that ends the text
    or the last of the best, nor a draft for which there is no free place from its depth on.
    """
    shape = arrays.shape
    has_next = level + 1 < shape.levels(draft_len)
    before = (arrays.rows if level else arrays.roots).clone()
    sources: dict[int, dict[int, int]] = {}  # the row behind which a node is computed
    for request in range(batch):
        committed, capacity = int(state.committed[request]), int(state.capacity[request])
        room = min(int(state.max_len[request]) - 1, capacity) - committed - of_pairs
        own_len = max(0, min(draft_len, room))
        nodes = _nodes(arrays, state, trees, request) if level else []
        nodes += _offered(arrays, state, request, own_len, level, nodes, before)
        order = sorted(range(len(nodes)), key=lambda i: (-nodes[i][2], i))
        kept = sorted(order[:own_len])
        best = order[: max(own_len - 1, 0)]  # the last of all has no child among them
        number = {old: i + 1 for i, old in enumerate(kept)}
        for i, old in enumerate(kept):
            token, parent, score, place, kind, _ = nodes[old]
            state.drafts[request, i] = token
            trees.parents[request, i] = number[parent - 1] if parent else 0
            arrays.scores[request, i] = score
            arrays.kinds[request, i] = kind
            arrays.places[request, i] = place if old in best else 0
        trees.counts[request] = len(kept)
        if not has_next:
            continue
        end = int(arrays.ends[request])
        fresh = [old for old in best if nodes[old][5] is not None and nodes[old][0] != end]
        if shape.given is not None and state.sampling.greedy[request]:
            below = [shape.given.children[node[4]] for node in nodes]
            fresh = [old for old in fresh if any(0 < kind <= own_len for kind in below[old])]
        last = min(own_len, _room(state, limits, request)) - 1 if committed else 0
        held = set(arrays.places[request, : len(kept)].tolist())
        free = [place for place in range(level + 1, last + 1) if place not in held]
        followed = list(zip(fresh[: shape.width], free, strict=False))
        arrays.frontier[request] = 0
        sources[request] = {}
        for slot, (old, place) in enumerate(followed):
            arrays.frontier[request, slot] = number[old]
            arrays.places[request, number[old] - 1] = place
            sources[request][number[old]] = int(nodes[old][5] or 0)
    if has_next:
        _describe(arrays, state, trees, step, limits, batch, draft_len, level, sources, of_pairs)


Node = tuple[int, int, float, int, int, int | None]
"""Token, the node before it (0: the root), score, place, kind; of a new one the row that offers
it."""


def _nodes(arrays: GrowthArrays, state: RoundState, trees: DraftTrees, request: int) -> list[Node]:
    count = int(trees.counts[request])
    lists = (state.drafts, trees.parents, arrays.scores, arrays.places, arrays.kinds)
    columns = [list_of[request, :count].tolist() for list_of in lists]
    return [(*each, None) for each in zip(*columns, strict=True)]


def _offered(
    arrays: GrowthArrays,
    state: RoundState,
    request: int,
    draft_len: int,
    level: int,
    nodes: list[Node],
    before: torch.Tensor,
) -> list[Node]:
    if not state.committed[request]:
        return []
    shape = arrays.shape
    found: list[Node] = []
    slots = shape.width if level else 1
    for slot in range(slots):
        parent = int(arrays.frontier[request, slot]) if level else 0
        if level and not parent:
            continue
        row = request * slots + slot
        offers = list(zip(arrays.ids[row].tolist(), arrays.values[row].tolist(), strict=True))
        kinds = [0] * len(offers)
        if not state.sampling.greedy[request]:
            offers = [(int(arrays.drawn[row]), 0.0)] if slot == 0 else []
        elif shape.given is not None:
            kinds = list(shape.given.children[nodes[parent - 1][4] if parent else 0])
            offers = [
                (token, 0.0 if 0 < kind <= draft_len and value > -math.inf else -math.inf)
                for (token, value), kind in zip(offers, kinds, strict=True)
            ]
        score = nodes[parent - 1][2] if parent else 0.0
        found += [
            (token, parent, score + min(value, 0.0), 0, kind, int(before[row]))
            for (token, value), kind in zip(offers, kinds, strict=False)
            if value > -math.inf
        ]
    return found


def _room(state: RoundState, limits: StepLimits, request: int) -> int:
    """Places that the request's cache has, the root's included."""
    limit = min(int(state.capacity[request]), limits.max_seq_len)
    return limit - int(state.committed[request]) + 1


def _describe(
    arrays: GrowthArrays,
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
    level: int,
    sources: dict[int, dict[int, int]],
    of_pairs: bool,
) -> None:
    """A step of the drafts that are followed: earlier steps have stored the root, and those before
    them. Where fewer are followed than may be, the others are any token at the root's position that
    is not stored. Tokens of padding follow all others.

    Where one draft of a level is followed, those that are followed are a chain, and its last is the
    only token; where nobody is, any other takes its place."""
    shape, per_block = arrays.shape, limits.tokens_per_block
    count, is_chain = shape.width, shape.is_followed_one_by_one
    behind = shape.places(level + 1, draft_len)
    sizes = [count if state.committed[request] else 0 for request in range(batch)]
    first, spare = 0, sum(sizes)
    step.cu_q[0] = 0
    for request, size in enumerate(sizes):
        committed, capacity = int(state.committed[request]), int(state.capacity[request])
        most = min(capacity, limits.max_seq_len)
        step.kv_len[request] = min(committed + behind, most) if size else 0
        step.tree_start[request] = request * count if size and not is_chain else -1
        step.tree_root[request] = max(committed - 1, 0)
        for nth in range(count):
            is_live = nth < size
            index = first + nth if is_live else spare + nth
            node = int(arrays.frontier[request, nth]) if is_live else 0
            place = int(arrays.places[request, node - 1]) if node else 0
            place = level + 1 if is_chain else place
            depth = level + 1 if node or is_chain else 0
            position = min(committed - 1 + depth, limits.max_seq_len - 1) if is_live else 0
            step.token_ids[index] = state.drafts[request, node - 1] if node else 0
            step.position_ids[index] = position
            step.slot_mapping[index] = -1
            arrays.sources[index] = sources[request][node] if node else 0
            at = committed - 1 + place
            if (node or (is_chain and is_live)) and at < capacity:
                block = int(step.block_tables[request, at // per_block])
                step.slot_mapping[index] = block * per_block + at % per_block
            if is_live and not is_chain:
                path = _path(arrays, trees, request, node)
                step.paths[request * count + nth, : len(path)] = torch.tensor(path)
            row, at = request * count + nth, index if is_live else 0
            step.logit_rows[row] = at
            arrays.rows[row] = at if of_pairs else row
        first += size
        spare += count - size
        step.cu_q[request + 1] = first


def _path(arrays: GrowthArrays, trees: DraftTrees, request: int, node: int) -> list[int]:
    """Places from the root down."""
    path: list[int] = []
    while node:
        path.insert(0, int(arrays.places[request, node - 1]))
        node = int(trees.parents[request, node - 1])
    return [0, *path]


def list_moves(
    arrays: GrowthArrays,
    state: RoundState,
    trees: DraftTrees,
    step: DeviceStep,
    limits: StepLimits,
    batch: int,
    draft_len: int,
) -> None:
    """After acceptance, of each draft of the accepted path whose key is not where its depth says,
    the nearest to the root first. A draft without a key was followed by nobody: it is the last."""
    moves: list[tuple[int, int]] = []
    per_block = limits.tokens_per_block
    for request in range(batch):
        arrays.starts[request] = len(moves)
        committed = int(state.committed[request])
        if not committed:
            continue
        node = int(trees.rows[request]) - request * (draft_len + 1)
        path = _path(arrays, trees, request, node)[1:]
        root = committed - 2 - len(path)
        for depth, place in enumerate(path, 1):
            if place > depth and root + place < state.capacity[request]:
                both = [divmod(root + at, per_block) for at in (place, depth)]
                table = step.block_tables[request]
                source, target = (int(table[block]) * per_block + at for block, at in both)
                moves.append((source, target))
    arrays.starts[batch] = len(moves)
    if moves:
        arrays.moves[: len(moves)] = torch.tensor(moves, dtype=torch.int32)
