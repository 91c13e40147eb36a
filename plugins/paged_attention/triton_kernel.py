"""Paged attention on tensor cores, with one order of arithmetic for every row.

A query's bits must not depend on what shares its step, so the keys are cut at fixed absolute
positions (tiles.py). The tiles of a unit go through one online softmax, and the results of units
are merged from left to right. Units grow with the context (16 of one tile, 8 of two, 8 of four),
so there are few of them, and none is longer than an eighth of what precedes it.

Whoever computes a unit gets the same bits: the same tensor-core instruction over the same keys in
the same order, sums over keys within one warp's registers and then its lanes. Tiles that a row
does not see leave its state as it is, bit for bit, so they may be skipped or not.

`generation` splits a request's units over thread blocks, which then merge them, each for some of
the rows. `context` gives each block of query tokens a thread block. Rows are query tokens times the
query heads of one KV head. 64 rows and 4 warps, or 128 and 8: each row's keys lie in one warp.

FP8 keys and values are read as float16, which holds them exactly, and so are the queries beside
them; 16-bit ones as they are. Sums and states are float32, weights are rounded to the values' type.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.paged_attention import tiles
from llmctl.plugins.quantize.triton_kernel import saturate

KEYS: tl.constexpr = tl.constexpr(tiles.KEYS)
UNIT: tl.constexpr = tl.constexpr(tiles.UNIT)
_BASE_OCTAVE: tl.constexpr = tl.constexpr(tiles.UNIT.bit_length() - 1)


@triton.jit
def highest_bit(value):
    """The largest power of two up to value; 0 for 0. Values below 2^16."""
    value = value | (value >> 1)
    value = value | (value >> 2)
    value = value | (value >> 4)
    value = value | (value >> 8)
    return value - (value >> 1)


@triton.jit
def unit_size(tile):
    """Tiles in the unit that holds this tile."""
    return tl.maximum(highest_bit(tile) >> 3, UNIT)


@triton.jit
def unit_start(tile):
    """The first tile of the unit that holds this tile."""
    return tile & -unit_size(tile)


@triton.jit
def starts_unit(tile):
    """Whether this tile is the first of its unit."""
    return unit_start(tile) == tile


@triton.jit
def next_unit(tile):
    """The first tile at or after this one that starts a unit."""
    size = unit_size(tile)
    return (tile + size - 1) & -size


@triton.jit
def unit_index(tile):
    """How many units end at or before this tile."""
    top = highest_bit(tile)
    octave = 0
    for bit in tl.static_range(4, 16):
        octave += ((top >> bit) & 1) * (bit - 4)
    later = 8 * octave + 16 + ((tile - top) // tl.maximum(top >> 3, 1)) - 8 * _BASE_OCTAVE
    return tl.where(tile < 16 * UNIT, tile // UNIT, later)


@triton.jit
def keys_of(tile):
    """The positions of a tile's keys."""
    return tl.arange(0, KEYS) + tile * KEYS


@triton.jit
def load_pages(table, tile, limit, TOKENS_PER_BLOCK: tl.constexpr):
    """The cache block of each of a tile's keys; 0 for keys from `limit` on."""
    key = keys_of(tile)
    return tl.load(table + key // TOKENS_PER_BLOCK, mask=key < limit, other=0)


@triton.jit
def load_tile(
    cache,
    pages,
    tile,
    limit,
    HEADS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys and values [KEYS, WIDTH] of one head, whose first block is at `cache`."""
    key = keys_of(tile)
    one: tl.constexpr = HEADS * TOKENS_PER_BLOCK * SIZE  # elements of a block's keys
    row = pages.to(tl.int64) * (2 * one) + (key % TOKENS_PER_BLOCK) * SIZE
    dims = tl.arange(0, WIDTH)
    mask = (key < limit)[:, None]
    if WIDTH != SIZE:
        mask = mask & (dims < SIZE)[None, :]
    pointers = cache + row[:, None] + dims[None, :]
    k = tl.load(pointers, mask=mask, other=0.0)
    v = tl.load(pointers + one, mask=mask, other=0.0)
    return k, v


@triton.jit
def attend(q, k, v, visible, largest, total, acc, scale, MASKED: tl.constexpr):
    """Take one tile into a unit's state: the largest logit, the sum of weights, weighted values."""
    logits = tl.dot(q, tl.trans(k))
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    top = tl.maximum(largest, tl.max(logits, axis=1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.math.exp2(tl.fma(logits, scale, -base[:, None]))
    fade = tl.math.exp2(largest - base)
    total = tl.fma(total, fade, tl.sum(weights, axis=1))
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc


@triton.jit
def merge(largest, total, acc, unit_largest, unit_total, unit_acc):
    """Append one unit to what lies left of it."""
    top = tl.maximum(largest, unit_largest)
    base = tl.where(top == float("-inf"), 0.0, top)
    left = tl.math.exp2(largest - base)
    right = tl.math.exp2(unit_largest - base)
    total = tl.fma(total, left, unit_total * right)
    acc = tl.fma(acc, left[:, None], unit_acc * right[:, None])
    return top, total, acc


@triton.jit
def store_rows(pointers, mask, acc, total, value_scale, quanta, dtype, STATIC: tl.constexpr):
    """Divide by the sum of weights, round to the model's type, quantize if asked."""
    factor = tl.math.div_rn(value_scale, total)
    rows = (tl.fma(acc, factor[:, None], 0.0)).to(dtype)  # + 0: no negative zeros
    if STATIC:
        tl.store(pointers, saturate(rows.to(tl.float32) * quanta), mask=mask)
    else:
        tl.store(pointers, rows, mask=mask)


@triton.jit
def sees(key, position, limit, WINDOW: tl.constexpr):
    """[rows, keys]: causal, within the window, and written."""
    visible = (key[None, :] <= position[:, None]) & (key < limit)[None, :]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return visible


@triton.jit
def sees_tree(key, position, limit, first, words, row_mask, WINDOW, WORDS: tl.constexpr):
    """Like `sees`, but which of the step's own tokens are visible is a bit per token."""
    visible = (key < tl.minimum(first, limit))[None, :] & row_mask[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    for word in tl.static_range(WORDS):
        bit = key - first - 32 * word
        held = tl.load(words + word, mask=row_mask, other=0)
        chosen = (held[:, None] >> tl.minimum(tl.maximum(bit, 0), 31)[None, :]) & 1
        inside = (bit >= 0) & (bit < 32) & (key < limit)
        visible = visible | (inside[None, :] & (chosen == 1))
    return visible


@triton.jit
def load_scales(softmax_scale, k_scale, v_scale, out_scale, K_SCALE, V_SCALE, STATIC):
    """The factor of logits, that of values, and what the output is multiplied by."""
    scale = softmax_scale
    if K_SCALE:
        scale *= tl.load(k_scale)
    value_scale = 1.0
    if V_SCALE:
        value_scale = tl.load(v_scale)
    quanta = 1.0
    if STATIC:
        quanta = tl.math.div_rn(1.0, tl.load(out_scale))
    return scale, value_scale, quanta


@triton.jit
def load_queries(pointers, mask, inner: tl.constexpr):
    """Rows of queries; beside FP8 keys as float16, which holds them exactly up to its range."""
    queries = tl.load(pointers, mask=mask, other=0)
    if queries.dtype != inner:
        wide = queries.to(tl.float32)
        queries = tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(inner)
    return queries


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
    tree_mask,
    partial_acc,
    partial_state,
    counters,
    softmax_scale,
    table_stride,
    block_tokens,
    max_entries,
    max_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE_TOKENS: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Requests of up to max_tokens tokens. Grid: splits, KV heads * blocks of tokens, requests.

    A block of rows is block_tokens tokens (block_tokens * GROUP <= ROWS). softmax_scale includes
    log2(e). A request with more than max_entries units is not split. AHEAD: what is on its way
    while a tile is computed: 0 nothing, 1 the next tile's pages, 2 also its keys and values.
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
    inner: tl.constexpr = tl.float16 if cache.dtype.element_ty == tl.float8e4nv else dtype
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
    # Positions are at least limit - count + token: bounds that need no further load.
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(limit - count + first_token - WINDOW + 1, 0) // KEYS
    end_tile = (limit + KEYS - 1) // KEYS
    if TREE_TOKENS > 0:
        WORDS: tl.constexpr = (TREE_TOKENS + 31) // 32
        words = tree_mask + (request * TREE_TOKENS + token) * WORDS
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
        pages = load_pages(table, begin, loaded, TOKENS_PER_BLOCK)
    if AHEAD > 1:
        next_pages = load_pages(table, begin + 1, loaded, TOKENS_PER_BLOCK)
        k, v = load_tile(keys_base, pages, begin, loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
        pages = next_pages
    for tile in tl.range(begin, end):
        if AHEAD > 1:
            # The next tile is on its way while this one is computed, and the pages after it.
            next_k, next_v = load_tile(
                keys_base, pages, tile + 1, loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH
            )
            pages = load_pages(table, tile + 2, loaded, TOKENS_PER_BLOCK)
        else:
            if AHEAD == 0:
                pages = load_pages(table, tile, loaded, TOKENS_PER_BLOCK)
            k, v = load_tile(keys_base, pages, tile, loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
            if AHEAD > 0:
                pages = load_pages(table, tile + 1, loaded, TOKENS_PER_BLOCK)
        key = keys_of(tile)
        if TREE_TOKENS > 0:
            visible = sees_tree(key, position, limit, limit - count, words, row_mask, WINDOW, WORDS)
        else:
            visible = sees(key, position, limit, WINDOW)
        unit_largest, unit_total, unit_acc = attend(
            queries,
            k.to(inner),
            v.to(inner),
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
        if starts_unit(tile + 1) | (tile + 1 == end):
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
        m = tl.full([MERGED_ROWS], float("-inf"), tl.float32)
        s = tl.zeros([MERGED_ROWS], tl.float32)
        a = tl.zeros([MERGED_ROWS, WIDTH], tl.float32)
        for entry in tl.range(0, num_entries, 8):
            # Eight entries are under way at once.
            m0, s0, a0 = load_entry(
                rows_at, states_at, entry, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m1, s1, a1 = load_entry(
                rows_at, states_at, entry + 1, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m2, s2, a2 = load_entry(
                rows_at, states_at, entry + 2, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m3, s3, a3 = load_entry(
                rows_at, states_at, entry + 3, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m4, s4, a4 = load_entry(
                rows_at, states_at, entry + 4, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m5, s5, a5 = load_entry(
                rows_at, states_at, entry + 5, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m6, s6, a6 = load_entry(
                rows_at, states_at, entry + 6, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m7, s7, a7 = load_entry(
                rows_at, states_at, entry + 7, num_entries, part_mask, wide_mask, num_rows, SIZE
            )
            m, s, a = merge(m, s, a, m0, s0, a0)
            m, s, a = merge(m, s, a, m1, s1, a1)
            m, s, a = merge(m, s, a, m2, s2, a2)
            m, s, a = merge(m, s, a, m3, s3, a3)
            m, s, a = merge(m, s, a, m4, s4, a4)
            m, s, a = merge(m, s, a, m5, s5, a5)
            m, s, a = merge(m, s, a, m6, s6, a6)
            m, s, a = merge(m, s, a, m7, s7, a7)
        at = (start + part_token).to(tl.int64) * (HEADS * GROUP * SIZE)
        at += (head * GROUP + part % GROUP) * SIZE
        store_rows(
            out + at[:, None] + dims[None, :], wide_mask, a, s, value_scale, quanta, dtype, STATIC
        )
    if PDL:
        tl.debug_barrier()
        if tl.atomic_add(counters + group, 1, sem="relaxed", scope="gpu") == 2 * num_splits - 1:
            tl.store(counters + group, 0)


@triton.jit
def load_entry(rows_at, states_at, entry, num_entries, part_mask, wide_mask, num_rows, SIZE):
    """One unit's state; one that leaves a merge unchanged beyond the last."""
    inside = entry < num_entries
    at = entry * num_rows
    acc = tl.load(rows_at + at * SIZE, mask=wide_mask & inside, other=0.0, cache_modifier=".cg")
    states = states_at + at * 2
    mask = part_mask & inside
    largest = tl.load(states, mask=mask, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(states + num_rows, mask=mask, other=0.0, cache_modifier=".cg")
    return largest, total, acc


@triton.jit
def context(
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
    softmax_scale,
    table_stride,
    num_requests,
    min_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Requests of at least min_tokens tokens. Grid: KV heads, blocks of query tokens.

    Request i's blocks start at cu_q[i] // TOKENS + i, which leaves room for the last, partial
    block of each; the longest contexts come first.
    """
    if PDL:
        gdc_launch_dependents()
    scale, value_scale, quanta = load_scales(
        softmax_scale, k_scale, v_scale, out_scale, K_SCALE, V_SCALE, STATIC
    )
    if PDL:
        gdc_wait()
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    ordinal = tl.num_programs(1) - 1 - tl.program_id(1)
    each = tl.arange(0, MAX_REQUESTS)
    firsts = tl.load(cu_q + each, mask=each < num_requests, other=0) // TOKENS + each
    request = tl.sum(((firsts <= ordinal) & (each < num_requests)).to(tl.int32), axis=0) - 1
    start = tl.load(cu_q + request)
    count = tl.load(cu_q + request + 1) - start
    limit = tl.load(kv_lens + request)
    first_token = (ordinal - start // TOKENS - request) * TOKENS
    if (count < min_tokens) | (first_token >= count) | (limit <= 0):
        return
    dtype: tl.constexpr = q.dtype.element_ty
    inner: tl.constexpr = tl.float16 if cache.dtype.element_ty == tl.float8e4nv else dtype
    dims = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    row_mask = (row < TOKENS * GROUP) & (token < count)
    offset = (start + token).to(tl.int64) * (HEADS * GROUP * SIZE)
    offset += (head * GROUP + row % GROUP) * SIZE
    stored = row_mask[:, None] & (dims < SIZE)[None, :]
    position = tl.load(position_ids + start + token, mask=row_mask, other=-1)
    queries = load_queries(q + offset[:, None] + dims[None, :], stored, inner)

    first_key = tl.load(position_ids + start + first_token)
    last_key = tl.load(position_ids + start + tl.minimum(first_token + TOKENS, count) - 1)
    end_tile = (tl.minimum(last_key + 1, limit) + KEYS - 1) // KEYS
    if WINDOW > 0:
        first_tile = tl.maximum(first_key - WINDOW + 1, 0) // KEYS
        full_tile = first_tile
    else:
        first_tile = 0
        full_tile = tl.minimum(first_key + 1, limit) // KEYS  # all rows see all keys before it

    table = block_tables + request.to(tl.int64) * table_stride
    keys_base = cache + head.to(tl.int64) * (TOKENS_PER_BLOCK * SIZE)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    unit_largest = largest
    unit_total = total
    unit_acc = acc
    for tile in tl.range(first_tile, full_tile):
        pages = load_pages(table, tile, limit, TOKENS_PER_BLOCK)
        k, v = load_tile(keys_base, pages, tile, limit, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
        unit_largest, unit_total, unit_acc = attend(
            queries,
            k.to(inner),
            v.to(inner),
            True,
            unit_largest,
            unit_total,
            unit_acc,
            scale,
            False,
        )
        if starts_unit(tile + 1):
            largest, total, acc = merge(largest, total, acc, unit_largest, unit_total, unit_acc)
            unit_largest = tl.full([ROWS], float("-inf"), tl.float32)
            unit_total = tl.zeros([ROWS], tl.float32)
            unit_acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.range(full_tile, end_tile):
        pages = load_pages(table, tile, limit, TOKENS_PER_BLOCK)
        k, v = load_tile(keys_base, pages, tile, limit, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
        visible = sees(keys_of(tile), position, limit, WINDOW)
        unit_largest, unit_total, unit_acc = attend(
            queries,
            k.to(inner),
            v.to(inner),
            visible,
            unit_largest,
            unit_total,
            unit_acc,
            scale,
            True,
        )
        if starts_unit(tile + 1):
            largest, total, acc = merge(largest, total, acc, unit_largest, unit_total, unit_acc)
            unit_largest = tl.full([ROWS], float("-inf"), tl.float32)
            unit_total = tl.zeros([ROWS], tl.float32)
            unit_acc = tl.zeros([ROWS, WIDTH], tl.float32)
    # The last unit may be unfinished; an empty one changes nothing.
    largest, total, acc = merge(largest, total, acc, unit_largest, unit_total, unit_acc)
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
