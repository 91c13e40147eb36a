"""Attention of prompts and their chunks: a thread block for each block of query tokens.

state.py says why every row's bits stay the same.
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
    skip_to,
    starts_unit,
    tile_at,
)


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
    REACH,
    SINKS,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Requests of at least min_tokens tokens. Grid: KV heads, blocks of query tokens.

    Request i's blocks start at cu_q[i] // TOKENS + i, which leaves room for the last, partial
    block of each; the longest contexts come first. REACH and SINKS (`is_near`) are constants or
    arguments; without HAS_WINDOW they do not count.
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
    inner: tl.constexpr = tl.float16 if cache.dtype.element_ty.primitive_bitwidth == 8 else dtype
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
    before = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(first_key - REACH + 1, 0) // KEYS
        if HAS_SINKS:
            first_tile, before = skip_to(first_tile, SINKS)
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
            widen(k, inner),
            widen(v, inner),
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
    for step in tl.range(full_tile - before, end_tile):
        tile = tile_at(step, full_tile, before, HAS_SINKS)
        pages = load_pages(table, tile, limit, TOKENS_PER_BLOCK)
        k, v = load_tile(keys_base, pages, tile, limit, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
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
        if ends_unit(tile, tile_at(step + 1, full_tile, before, HAS_SINKS), HAS_SINKS):
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
