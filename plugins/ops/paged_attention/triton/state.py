"""Paged attention on tensor cores, with one order of arithmetic for every row.

A query's bits must not depend on what else is in its step, so the keys are divided at fixed
absolute positions (shared/tiles.py). The tiles of a work item (`unit`) go through one online
softmax, and the results of work items are merged from left to right. Work items grow with the
context (16 of one tile, 8 of two, 8 of four), so there are few of them, and none is longer than an
eighth of what precedes it.

Every kernel computes the same bits for a work item: the same 16 products at a time in the tensor
cores, over the same keys in the same order, and sums over keys first within one warp's registers
and then over its lanes. Tiles that a row does not see leave its state unchanged, bit for bit, so
they may be skipped or not.

`generation` (generation.py) divides a request's work items over thread blocks, which then
merge them, each for some of the rows. `context` (context.py) gives each block of query
tokens a thread block. This module has what both do to a row's state. Rows are query tokens times
the query heads of one KV head. 64 rows and 4 warps, or 128 and 8: each row's keys are in one warp.

FP8 and INT8 keys and values are read as float16, which represents them exactly, and so are the
queries multiplied with them; 16-bit ones are read unchanged. Sums and states are float32, weights
are rounded to the values' type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.plugins.ops.quantize.triton_kernel import saturate


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
def sees(key, position, limit, reach, sinks, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr):
    """[rows, keys]: causal, within the window or a sink, and written."""
    visible = (key[None, :] <= position[:, None]) & (key < limit)[None, :]
    if HAS_WINDOW:
        visible = visible & is_near(key, position, reach, sinks, HAS_SINKS)
    return visible


@triton.jit
def is_near(key, position, reach, sinks, HAS_SINKS: tl.constexpr):
    """[rows, keys]: among the last `reach` keys up to the row's own, or the first `sinks`."""
    near = key[None, :] > position[:, None] - reach
    if HAS_SINKS:
        near = near | (key < sinks)[None, :]
    return near


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
    """Rows of queries; beside byte keys as float16, which holds them exactly up to its range."""
    queries = tl.load(pointers, mask=mask, other=0)
    if queries.dtype != inner:
        wide = queries.to(tl.float32)
        queries = tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(inner)
    return queries


@triton.jit
def widen(values, inner: tl.constexpr):
    """Keys or values as tensor cores take them, exactly."""
    if values.dtype == tl.int8:
        # From 1024 to 2048 neighbours of float16 are 1 apart: its bits are 1024's and the number's.
        # That takes fewer registers and cycles than the conversion.
        above = (values.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return above.to(tl.float16, bitcast=True) - 1152.0
    else:
        return values.to(inner)


@triton.jit
def merge_entries(
    rows_at,
    states_at,
    num_entries,
    part_mask,
    wide_mask,
    num_rows,
    MERGED_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sum of weights and the weighted values of some rows, from all units that were stored."""
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
    return s, a


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
