"""The bookkeeping of rounds whose drafts are trees; tree_reference.py says the same plainly."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.device_loop import state
from llmctl.plugins.device_loop.triton_kernel import _inside, _slot_of

_ACCEPTED: tl.constexpr = tl.constexpr(state.RECORD_ACCEPTED)
_EMITTED: tl.constexpr = tl.constexpr(state.RECORD_EMITTED)
_DRAFTS: tl.constexpr = tl.constexpr(state.RECORD_DRAFTS)
_TOKENS: tl.constexpr = tl.constexpr(state.RECORD_TOKENS)


@triton.jit
def _num_tokens(committed, max_len, capacity, counts, request, in_batch, draft_len):
    """Of each request in a round: its root and the drafts that take part; 0 for padding."""
    length = tl.load(committed + request, mask=in_batch, other=0)
    most = tl.load(max_len + request, mask=in_batch, other=0)
    limit = tl.load(capacity + request, mask=in_batch, other=0)
    count = tl.load(counts + request, mask=in_batch, other=0)
    room = tl.minimum(most - 1, limit) - length
    drafts = tl.maximum(tl.minimum(tl.minimum(count, draft_len), room), 0)
    return tl.where(length > 0, 1 + drafts, 0)


@triton.jit
def feed_tree(
    root,
    committed,
    max_len,
    capacity,
    drafts,
    parents,
    counts,
    positions,
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
    draft_len,
    max_seq_len,
    tokens_per_block,
    max_blocks,
    MAX_DRAFT_LEN: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (requests)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PATH: tl.constexpr = MAX_DRAFT_LEN + 1
    own = tl.program_id(0)
    request = tl.arange(0, BLOCK_REQUESTS)
    sizes = _num_tokens(committed, max_len, capacity, counts, request, request < batch, draft_len)
    size = tl.sum(tl.where(request == own, sizes, 0), 0)
    first = tl.sum(tl.where(request < own, sizes, 0), 0)
    width = draft_len + 1
    # Tokens of requests come first; what the requests before leave of their widths, this one's too.
    spare = tl.sum(sizes, 0) + own * width - first
    length = tl.load(committed + own)
    limit = tl.load(capacity + own)
    is_real = length > 0
    if own == 0:
        tl.store(cu_q, 0)
    tl.store(cu_q + own + 1, first + size)
    tl.store(kv_len + own, tl.where(is_real, tl.minimum(length - 1 + size, limit), 0))
    tl.store(tree_start + own, tl.where(size > 1, own * width, -1))
    tl.store(tree_root + own, tl.maximum(length - 1, 0))

    table = block_tables + own * max_blocks
    for start in range(0, width, BLOCK_NODES):
        node = start + tl.arange(0, BLOCK_NODES)
        exists = node < width
        is_live = node < size
        is_draft = is_live & (node > 0)
        row = own * width + node
        up = tl.where(is_draft, node, 0)
        depth = tl.zeros_like(node)
        while tl.max(up, axis=0) > 0:
            depth += (up > 0).to(tl.int32)
            up = _parent(parents + own * MAX_DRAFT_LEN, up)
        path = paths + row.to(tl.int64) * PATH
        tl.store(path, tl.zeros_like(node), mask=is_live)
        up = tl.where(is_draft, node, 0)
        at = depth
        while tl.max(up, axis=0) > 0:
            tl.store(path + at, up, mask=up > 0)
            up = _parent(parents + own * MAX_DRAFT_LEN, up)
            at -= 1

        value = tl.load(drafts + own * MAX_DRAFT_LEN + node - 1, mask=is_draft, other=0)
        value += tl.load(root + own + node * 0, mask=is_live & (node == 0), other=0)
        slot = _slot_of(table, length - 1 + node, limit, is_live, tokens_per_block)
        index = tl.where(is_live, first + node, spare + node - size)
        tl.store(token_ids + index, value, mask=exists)
        position = _inside(length - 1 + depth, is_live, max_seq_len)
        tl.store(position_ids + index, position, mask=exists)
        tl.store(slot_mapping + index, slot, mask=exists)
        fallback = tl.where(is_real, first, 0)
        tl.store(logit_rows + row, tl.where(is_live, first + node, fallback), mask=exists)
        tl.store(positions + row, length + depth, mask=exists)


@triton.jit
def _parent(parents, node):
    """The parent of each node that is not the root: a smaller one, whatever is stored."""
    parent = tl.load(parents + node - 1, mask=node > 0, other=0)
    return tl.minimum(parent, node - 1)


@triton.jit
def spread(
    temperature,
    top_k,
    top_p,
    min_p,
    seed_low,
    seed_high,
    stream,
    greedy,
    row_temperature,
    row_top_k,
    row_top_p,
    row_min_p,
    row_seed_low,
    row_seed_high,
    row_stream,
    row_greedy,
    rows,
    width,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows / BLOCK_ROWS): each row gets what its request has."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = row < rows
    request = row // width
    tl.store(row_temperature + row, tl.load(temperature + request, mask=exists), mask=exists)
    tl.store(row_top_k + row, tl.load(top_k + request, mask=exists), mask=exists)
    tl.store(row_top_p + row, tl.load(top_p + request, mask=exists), mask=exists)
    tl.store(row_min_p + row, tl.load(min_p + request, mask=exists), mask=exists)
    tl.store(row_seed_low + row, tl.load(seed_low + request, mask=exists), mask=exists)
    tl.store(row_seed_high + row, tl.load(seed_high + request, mask=exists), mask=exists)
    tl.store(row_stream + row, tl.load(stream + request, mask=exists), mask=exists)
    tl.store(row_greedy + row, tl.load(greedy + request, mask=exists), mask=exists)


@triton.jit
def accept_tree(
    root,
    previous,
    committed,
    max_len,
    capacity,
    drafts,
    parents,
    counts,
    targets,
    block_tables,
    rows,
    starts,
    moves,
    counter,
    ring,
    batch,
    draft_len,
    slots,
    tokens_per_block,
    max_blocks,
    MAX_BATCH_SIZE: tl.constexpr,
    MAX_DRAFT_LEN: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block; BLOCK_REQUESTS requests with all their nodes at a time."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDTH: tl.constexpr = _TOKENS + MAX_DRAFT_LEN + 1
    finished = tl.load(counter)
    record = ring + (finished % slots).to(tl.int64) * (MAX_BATCH_SIZE * WIDTH)
    node = tl.arange(0, BLOCK_NODES)[None, :]  # and the depth of a path's node, in `path`
    num_moves = tl.zeros([1], tl.int32)
    for start in range(0, MAX_BATCH_SIZE, BLOCK_REQUESTS):
        request = start + tl.arange(0, BLOCK_REQUESTS)
        in_batch = request < batch
        size = _num_tokens(committed, max_len, capacity, counts, request, in_batch, draft_len)
        length = tl.load(committed + request, mask=in_batch, other=0)
        limit = tl.load(capacity + request, mask=in_batch, other=0)
        room = tl.load(max_len + request, mask=in_batch, other=0) - length - 1
        is_real = length > 0
        before = tl.load(root + request, mask=is_real, other=0)

        is_draft = (node > 0) & (node < size[:, None])
        own = request[:, None] * MAX_DRAFT_LEN + node - 1
        parent = tl.load(parents + own, mask=is_draft, other=-1)
        token = tl.load(drafts + own, mask=is_draft, other=0)
        drawn = targets + request[:, None] * (draft_len + 1) + node
        target = tl.load(drawn, mask=node < size[:, None], other=0)

        # Down the tree, all requests one node at a time.
        last = tl.zeros_like(request)
        depth = tl.zeros_like(request)
        wanted = tl.sum(tl.where(node == 0, target, 0), axis=1)
        emitted = tl.where(node == 0, wanted[:, None], 0)
        path = tl.zeros_like(target)
        walks = (is_real & (room > 0)).to(tl.int32)
        while tl.max(walks, axis=0) > 0:
            stands = is_draft & (parent == last[:, None]) & (token == wanted[:, None])
            stands = stands & (walks[:, None] > 0)
            child = tl.min(tl.where(stands, node, BLOCK_NODES), axis=1)
            is_found = child < BLOCK_NODES
            depth += is_found.to(tl.int32)
            last = tl.where(is_found, child, last)
            before = tl.where(is_found, wanted, before)
            next_one = tl.sum(tl.where(node == child[:, None], target, 0), axis=1)
            wanted = tl.where(is_found, next_one, wanted)
            is_end = is_found[:, None] & (node == depth[:, None])
            emitted = tl.where(is_end, wanted[:, None], emitted)
            path = tl.where(is_end, last[:, None], path)
            walks = (is_found & (depth < room)).to(tl.int32)

        tl.debug_barrier()  # several threads may read a number that one of them replaces
        tl.store(root + request, wanted, mask=is_real)
        tl.store(previous + request, before, mask=is_real)
        tl.store(committed + request, length + depth + 1, mask=is_real)
        tl.store(rows + request, request * (draft_len + 1) + last, mask=is_real)

        # Who is not at the place of its depth; behind it nobody of the path is.
        is_moved = (node > 0) & (node <= depth[:, None]) & (path != node)
        moved = tl.sum(is_moved.to(tl.int32), axis=1)
        begin = num_moves + tl.cumsum(moved, 0) - moved
        num_moves += tl.sum(moved, axis=0)
        tl.store(starts + request, begin, mask=in_batch)
        move = moves + 2 * (begin + moved - depth - 1)[:, None] + 2 * node
        table = block_tables + request[:, None] * max_blocks
        source = _slot_of(
            table, length[:, None] - 1 + path, limit[:, None], is_moved, tokens_per_block
        )
        place = _slot_of(
            table, length[:, None] - 1 + node, limit[:, None], is_moved, tokens_per_block
        )
        tl.store(move, source, mask=is_moved)
        tl.store(move + 1, place, mask=is_moved)

        to = record + request * WIDTH
        exists = request < MAX_BATCH_SIZE
        tl.store(to, length, mask=exists)
        tl.store(to + _ACCEPTED, last, mask=exists)
        tl.store(to + _EMITTED, tl.where(is_real, depth + 1, 0), mask=exists)
        tl.store(to + _DRAFTS, tl.maximum(size - 1, 0), mask=exists)
        tl.store(
            to[:, None] + _TOKENS + node,
            tl.where(is_real[:, None], emitted, 0),
            mask=exists[:, None] & (node <= MAX_DRAFT_LEN),
        )
    tl.store(starts + batch + tl.arange(0, 1), num_moves)
    # Begins anew behind 2^31 - 1, where it would turn negative; `slots` divides 2^31.
    tl.store(counter, (finished + 1) & 0x7FFFFFFF)
