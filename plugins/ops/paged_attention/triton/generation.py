"""Attention of requests with few tokens: work items of keys over thread blocks, then merged.

state.py says why every row's bits stay the same, tree.py how trees keep them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.paged_attention.triton.state import (
    attend,
    load_queries,
    load_scales,
    merge,
    merge_entries,
    sees,
    store_rows,
    widen,
)
from llmctl.plugins.ops.paged_attention.triton.tiles import (
    KEYS,
    ends_unit,
    keys_of,
    load_pages,
    load_tile,
    next_unit,
    skip_to,
    tile_at,
    unit_index,
)
from llmctl.plugins.ops.paged_attention.triton.tree import attend_paths, tree_of


@triton.jit
def generation(
    q,
    k_scale,
    v_scale,
    out_scale,
    out,
    cache,
    position_ids,
    cu_q,
    kv_lens,
    block_tables,
    tree_start,
    tree_root,
    paths,
    partial_acc,
    partial_state,
    counters,
    softmax_scale,
    table_stride,
    path_stride,
    block_tokens,
    max_entries,
    max_tokens,
    REACH,
    SINKS,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Requests of up to max_tokens tokens. Grid: splits, KV heads * blocks of tokens, requests.

    A block of rows is block_tokens tokens (block_tokens * GROUP <= ROWS). softmax_scale includes
    log2(e). A request with more than max_entries units is not split. AHEAD: what is on its way
    while a tile is computed: 0 nothing, 1 the next tile's pages, 2 also its keys and values. REACH
    and SINKS are as in `context`; tiles of sinks that do not touch the window are split 0's. With
    HAS_TREES requests may be trees (AHEAD is 0 then): `DeviceStep` says where.
    """
    if PDL:
        gdc_launch_dependents()
    scale, value_scale, quanta = load_scales(
        softmax_scale, k_scale, v_scale, out_scale, K_SCALE, V_SCALE, STATIC
    )
    if PDL:
        gdc_wait()
    split = tl.program_id(0)
    head = tl.program_id(1) % HEADS
    block = tl.program_id(1) // HEADS
    request = tl.program_id(2)
    start = tl.load(cu_q + request)
    count = tl.load(cu_q + request + 1) - start
    limit = tl.load(kv_lens + request)
    first_token = block * block_tokens
    if (count > max_tokens) | (first_token >= count) | (limit <= 0):
        return
    dtype: tl.constexpr = q.dtype.element_ty
    inner: tl.constexpr = tl.float16 if cache.dtype.element_ty.primitive_bitwidth == 8 else dtype
    dims = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    row_mask = (row < block_tokens * GROUP) & (token < count)
    offset = (start + token).to(tl.int64) * (HEADS * GROUP * SIZE)
    offset += (head * GROUP + row % GROUP) * SIZE
    position = tl.load(position_ids + start + token, mask=row_mask, other=-1)
    stored = row_mask[:, None] & (dims < SIZE)[None, :]
    queries = load_queries(q + offset[:, None] + dims[None, :], stored, inner)
    # Which tiles the rows can see, and which of those are this split's.
    # Positions are at least limit - count + token, those of a tree at least its root's: bounds that
    # need no further load.
    first_tile = 0
    before = 0
    lowest = limit - count + first_token
    if HAS_TREES:
        root, tree_row = tree_of(tree_start, tree_root, request, limit)
        lowest = tl.minimum(lowest, root)
    if HAS_WINDOW:
        first_tile = tl.maximum(lowest - REACH + 1, 0) // KEYS
        if HAS_SINKS:
            first_tile, before = skip_to(first_tile, SINKS)
    end_tile = (limit + KEYS - 1) // KEYS
    num_tiles = end_tile - first_tile
    if num_tiles <= 0:
        return
    run = (num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    head_unit = unit_index(first_tile)
    last_unit = unit_index(end_tile - 1)
    if last_unit - head_unit >= max_entries:
        run = num_tiles
    num_splits = (num_tiles + run - 1) // run
    if split >= num_splits:
        return
    begin = first_tile + split * run
    end = tl.minimum(next_unit(tl.minimum(begin + run, end_tile)), end_tile)
    if split > 0:
        begin = tl.minimum(next_unit(begin), end_tile)
    if HAS_SINKS:
        before = tl.where(split == 0, before, 0)

    # Entries: split 0 merges its own units; every other unit is stored by itself.
    first_end = tl.minimum(next_unit(tl.minimum(first_tile + run, end_tile)), end_tile)
    group = (request * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    num_rows = block_tokens * GROUP
    acc_base = partial_acc + group * max_entries * num_rows * SIZE
    state_base = partial_state + group * max_entries * num_rows * 2
    stored_at = row[:, None] * SIZE + dims[None, :]

    table = block_tables + request.to(tl.int64) * table_stride
    keys_base = cache + head.to(tl.int64) * (TOKENS_PER_BLOCK * SIZE)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    unit_largest = largest
    unit_total = total
    unit_acc = acc
    loaded = tl.minimum(limit, end * KEYS)
    if AHEAD > 0:
        tile = tile_at(begin - before, begin, before, HAS_SINKS)
        pages = load_pages(table, tile, loaded, TOKENS_PER_BLOCK)
    if AHEAD > 1:
        second = tile_at(begin - before + 1, begin, before, HAS_SINKS)
        next_pages = load_pages(table, second, loaded, TOKENS_PER_BLOCK)
        k, v = load_tile(keys_base, pages, tile, loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
        pages = next_pages
    for step in tl.range(begin - before, end):
        tile = tile_at(step, begin, before, HAS_SINKS)
        next_tile = tile_at(step + 1, begin, before, HAS_SINKS)
        if HAS_TREES:
            unit_largest, unit_total, unit_acc = attend_paths(
                queries, keys_base, table, tile, loaded, position, token, first_token,
                tl.minimum(block_tokens, count - first_token), root, paths + tree_row * path_stride,
                path_stride, unit_largest, unit_total, unit_acc, scale, limit, REACH, SINKS,
                HAS_WINDOW, HAS_SINKS, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH, inner,
            )  # fmt: skip
        elif AHEAD > 1:
            # The next tile is on its way while this one is computed, and the pages after it.
            next_k, next_v = load_tile(
                keys_base, pages, next_tile, loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH
            )
            after = tile_at(step + 2, begin, before, HAS_SINKS)
            pages = load_pages(table, after, loaded, TOKENS_PER_BLOCK)
        else:
            if AHEAD == 0:
                pages = load_pages(table, tile, loaded, TOKENS_PER_BLOCK)
            k, v = load_tile(keys_base, pages, tile, loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
            if AHEAD > 0:
                pages = load_pages(table, next_tile, loaded, TOKENS_PER_BLOCK)
        if not HAS_TREES:
            visible = sees(keys_of(tile), position, limit, REACH, SINKS, HAS_WINDOW, HAS_SINKS)
            unit_largest, unit_total, unit_acc = attend(
                queries,
                widen(k, inner),
                widen(v, inner),
                visible,
                unit_largest,
                unit_total,
                unit_acc,
                scale,
                True,
            )
        if AHEAD > 1:
            k = next_k
            v = next_v
        if ends_unit(tile, next_tile, HAS_SINKS) | (step + 1 == end):
            if split > 0:
                entry = unit_index(tile) - unit_index(first_end) + 1
                at = entry * num_rows
                tl.store(acc_base + at * SIZE + stored_at, unit_acc, mask=stored)
                tl.store(state_base + at * 2 + row, unit_largest, mask=row_mask)
                tl.store(state_base + at * 2 + num_rows + row, unit_total, mask=row_mask)
            else:
                largest, total, acc = merge(largest, total, acc, unit_largest, unit_total, unit_acc)
            unit_largest = tl.full([ROWS], float("-inf"), tl.float32)
            unit_total = tl.zeros([ROWS], tl.float32)
            unit_acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if num_splits == 1:
        store_rows(
            out + offset[:, None] + dims[None, :],
            stored,
            acc,
            total,
            value_scale,
            quanta,
            dtype,
            STATIC,
        )
        return
    if split == 0:
        tl.store(acc_base + stored_at, acc, mask=stored)
        tl.store(state_base + row, largest, mask=row_mask)
        tl.store(state_base + num_rows + row, total, mask=row_mask)
    tl.debug_barrier()  # every thread's stores come before the release
    arrived = tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu")
    num_entries = tl.where(first_end < end_tile, last_unit - unit_index(first_end) + 2, 1)
    last_row = tl.minimum(num_rows, (count - first_token) * GROUP)
    begin_row = 0
    if PDL:
        # All splits run at once (see `launches`): each waits for the others and merges its rows.
        share = (last_row + num_splits - 1) // num_splits
        begin_row = split * share
        last_row = tl.minimum(begin_row + share, last_row)
        while arrived < num_splits:
            arrived = tl.atomic_add(counters + group, 0, sem="acquire", scope="gpu")
    else:
        # One after the other: the last to arrive merges everything.
        if arrived != num_splits - 1:
            return
        tl.store(counters + group, 0)
    for first_row in tl.range(begin_row, last_row, MERGED_ROWS):
        part = first_row + tl.arange(0, MERGED_ROWS)
        part_token = first_token + part // GROUP
        part_mask = part < last_row
        wide_mask = part_mask[:, None] & (dims < SIZE)[None, :]
        rows_at = acc_base + part[:, None] * SIZE + dims[None, :]
        states_at = state_base + part
        s, a = merge_entries(
            rows_at,
            states_at,
            num_entries,
            part_mask,
            wide_mask,
            num_rows,
            MERGED_ROWS,
            SIZE,
            WIDTH,
        )
        at = (start + part_token).to(tl.int64) * (HEADS * GROUP * SIZE)
        at += (head * GROUP + part % GROUP) * SIZE
        store_rows(
            out + at[:, None] + dims[None, :], wide_mask, a, s, value_scale, quanta, dtype, STATIC
        )
    if PDL:
        tl.debug_barrier()
        if tl.atomic_add(counters + group, 1, sem="relaxed", scope="gpu") == 2 * num_splits - 1:
            tl.store(counters + group, 0)
