"""A level of trees that grow: which drafts are kept, which are followed, and the step that computes
those; and the moves of an accepted path's keys. reference.py says the same plainly."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.device_loop.triton_kernel import _inside, _slot_of
from llmctl.plugins.device_loop.triton_tree import _parent
from llmctl.plugins.ops.tree_growth.arrays import NOTES
from llmctl.plugins.ops.tree_growth.triton_select import follow, keep_best

_NOTES: tl.constexpr = tl.constexpr(NOTES)


@triton.jit
def grow(
    committed,
    max_len,
    capacity,
    greedy,
    drafts,
    parents,
    counts,
    scores,
    places,
    kinds,
    frontier,
    children,
    ends,
    drawn,
    ids,
    log_probs,
    rows_before,
    rows,
    sources,
    ranking,
    notes,
    token_ids,
    position_ids,
    cu_q,
    kv_len,
    block_tables,
    slot_mapping,
    logit_rows,
    tree_start,
    tree_root,
    paths,
    batch,
    level,  # of whose rows offer: 0 the root's
    levels,
    draft_len,
    num_offers,
    width,
    stride,  # of drafts from request to request, as of parents, scores and places
    span,  # of the scratch
    of_pairs,  # whether `committed` counts pairs, and a row of logits is that of a token, in order
    is_given,  # whether `children` says which offers are taken
    max_seq_len,
    tokens_per_block,
    max_blocks,
    path_stride,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (requests)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0)
    length = tl.load(committed + own)
    limit = tl.load(capacity + own)
    own_drafts, own_parents = drafts + own * stride, parents + own * stride
    own_scores, own_places = scores + own * stride, places + own * stride
    note = notes + own * _NOTES * (span + 1)
    # What will be verified: a draft takes a place behind the root.
    own_len = tl.minimum(tl.load(max_len + own) - 1, limit) - length - of_pairs
    own_len = tl.maximum(tl.minimum(own_len, draft_len), 0)
    offered_by = tl.where(level > 0, width, 1)
    keep_best(
        own_drafts,
        own_parents,
        own_scores,
        own_places,
        kinds + own * stride,
        counts + own,
        frontier + own * width,
        children,
        drawn + own * offered_by,
        ids + own * offered_by * num_offers,
        log_probs + own * offered_by * num_offers,
        rows_before + own * offered_by,
        ranking + own * span,
        note,
        length > 0,
        tl.load(greedy + own) > 0,
        tl.load(ends + own),
        level,
        levels,
        own_len,
        offered_by,
        num_offers,
        is_given > 0,
        span,
        BLOCK,
        TILE,
    )
    if level + 1 < levels:
        # What a request has no cache for is not followed.
        last = tl.minimum(own_len, tl.minimum(limit, max_seq_len) - length + 1) - 1
        follow(
            own_places,
            counts + own,
            frontier + own * width,
            note,
            level,
            last,
            own_len,
            width,
            span,
            BLOCK_NODES,
            BLOCK_WIDTH,
        )
        request = tl.arange(0, BLOCK_REQUESTS)
        lengths = tl.load(committed + request, mask=request < batch, other=0)
        sizes = tl.where(lengths > 0, width, 0)
        size = tl.sum(tl.where(request == own, sizes, 0), 0)
        first = tl.sum(tl.where(request < own, sizes, 0), 0)
        # Tokens of requests come first; what others before leave of theirs, this one's too.
        spare = tl.sum(sizes, 0) + own * width - first
        is_chain = width == 1
        behind = tl.where(is_chain, level + 1, tl.minimum((level + 1) * width, draft_len - 1))
        entries = tl.minimum(length + behind, tl.minimum(limit, max_seq_len))
        if own == 0:
            tl.store(cu_q, 0)
        tl.store(cu_q + own + 1, first + size)
        tl.store(kv_len + own, tl.where(length > 0, entries, 0))
        tl.store(tree_start + own, tl.where((size > 0) & (is_chain == 0), own * width, -1))
        tl.store(tree_root + own, tl.maximum(length - 1, 0))

        table = block_tables + own * max_blocks
        nth = tl.arange(0, BLOCK_WIDTH)
        exists, is_live = nth < width, nth < size
        node = tl.load(frontier + own * width + nth, mask=is_live, other=0)
        is_new = node > 0
        index = tl.where(is_live, first + nth, spare + nth)
        place = tl.load(own_places + node - 1, mask=is_new, other=0)
        place = tl.where(is_chain, level + 1, place)
        depth = tl.where(is_new | is_chain, level + 1, 0)
        token = tl.load(own_drafts + node - 1, mask=is_new, other=0)
        tl.store(token_ids + index, token, mask=exists)
        position = _inside(length - 1 + depth, is_live, max_seq_len)
        tl.store(position_ids + index, position, mask=exists)
        is_stored = is_new | (is_chain & is_live)
        slot = _slot_of(table, length - 1 + place, limit, is_stored, tokens_per_block)
        tl.store(slot_mapping + index, slot, mask=exists)
        came_from = note + 4 * (span + 1)
        source = tl.load(came_from + node, mask=is_new, other=0)
        tl.store(sources + index, source, mask=exists)

        path = paths + (own * width + nth).to(tl.int64) * path_stride
        in_tree = is_live & (is_chain == 0)
        tl.store(path, tl.zeros_like(place), mask=in_tree)
        up, at = tl.where(in_tree, node, 0), depth
        while tl.max(up, axis=0) > 0:
            step = tl.load(own_places + up - 1, mask=up > 0, other=0)
            tl.store(path + at, step, mask=up > 0)
            up = _parent(own_parents, up)
            at -= 1
        to = own * width + nth
        at_token = tl.where(is_live, first + nth, 0)
        tl.store(logit_rows + to, at_token, mask=exists)
        tl.store(rows + to, tl.where(of_pairs > 0, at_token, to), mask=exists)


@triton.jit
def list_moves(
    rows,
    parents,
    places,
    committed,
    capacity,
    block_tables,
    starts,
    moves,
    batch,
    draft_len,
    stride,
    tokens_per_block,
    max_blocks,
    BLOCK_REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block, after acceptance. rows: of each request's last accepted node; committed:
    with what the round added."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.arange(0, BLOCK_REQUESTS)
    in_batch = request < batch
    length = tl.load(committed + request, mask=in_batch, other=0)
    limit = tl.load(capacity + request, mask=in_batch, other=0)
    last = tl.load(rows + request, mask=length > 0, other=0) - request * (draft_len + 1)
    last = tl.where(length > 0, last, 0)
    tree, own_places = parents + request * stride, places + request * stride
    depth = tl.zeros_like(last)
    up = last
    while tl.max(up, axis=0) > 0:
        depth += (up > 0).to(tl.int32)
        up = _parent(tree, up)
    root = length - 2 - depth
    up, at = last, depth
    moved = tl.zeros_like(last)
    while tl.max(up, axis=0) > 0:
        place = tl.load(own_places + up - 1, mask=up > 0, other=0)
        is_moved = (up > 0) & (place > at) & (root + place < limit)
        moved += is_moved.to(tl.int32)
        up = _parent(tree, up)
        at -= 1
    begin = tl.cumsum(moved, 0) - moved
    tl.store(starts + request, begin, mask=in_batch)
    tl.store(starts + batch + tl.arange(0, 1), tl.sum(moved, 0))
    # From the path's end up: the first move of a request is that of the draft nearest to the root.
    table = block_tables + request * max_blocks
    up, at, to = last, depth, begin + moved
    while tl.max(up, axis=0) > 0:
        place = tl.load(own_places + up - 1, mask=up > 0, other=0)
        is_moved = (up > 0) & (place > at) & (root + place < limit)
        to -= is_moved.to(tl.int32)
        source = _slot_of(table, root + place, limit, is_moved, tokens_per_block)
        target = _slot_of(table, root + at, limit, is_moved, tokens_per_block)
        tl.store(moves + 2 * to, source, mask=is_moved)
        tl.store(moves + 2 * to + 1, target, mask=is_moved)
        up = _parent(tree, up)
        at -= 1
