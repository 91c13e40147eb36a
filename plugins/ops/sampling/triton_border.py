"""The border of a filter that much of the vocabulary passes: where it is, and who passes it.

Parts of the kernels in triton_wide.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.plugins.ops.sampling.triton_filter import mass_of
from llmctl.plugins.ops.sampling.triton_values import (
    best_draw,
    exact_draw,
    order_of,
    rough_noise,
    scores_of,
    word_of,
)

LINE: tl.constexpr = tl.constexpr(64)  # 64 lines of 64 buckets


@triton.jit
def below_one(exponential):
    """How many float32 lie between a value and 1."""
    return 0x3F800000 - exponential.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def border_bucket(buckets, wanted):
    """(the first bucket up to which the mass is `wanted`, what is wanted of it); clears them."""
    line, column = tl.arange(0, LINE), tl.arange(0, LINE)
    place = line[:, None] * LINE + column[None, :]
    masses = tl.load(buckets + place, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(buckets + place, tl.zeros([LINE, LINE], tl.int64))
    of_lines = tl.sum(masses, axis=1)
    reached = tl.cumsum(of_lines, axis=0)
    at = tl.minimum(tl.sum((reached < wanted).to(tl.int32), axis=0), LINE - 1)
    before = tl.sum(tl.where(line < at, of_lines, 0), axis=0)
    of_columns = tl.sum(tl.where(line[:, None] == at, masses, 0), axis=0)
    reached = before + tl.cumsum(of_columns, axis=0)
    to = tl.minimum(tl.sum((reached < wanted).to(tl.int32), axis=0), LINE - 1)
    before += tl.sum(tl.where(column < to, of_columns, 0), axis=0)
    return at * LINE + to, wanted - before


@triton.jit
def settle(
    source,
    top,
    factor,
    p,
    least,
    position,
    stream,
    seed_low,
    seed_high,
    chunk_values,
    chunk_ids,
    num_listed,
    listed_ids,
    listed_values,
    mark,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    MASS_UNIT: tl.constexpr,
):
    """The token of a row, from the draws of its chunks and the listed ids; -1 if not all fit."""
    each = tl.arange(0, BLOCK_CHUNKS)
    exists = each < NUM_CHUNKS
    counts = tl.load(num_listed + each, mask=exists, other=0, cache_modifier=".cg")
    token = tl.full([], -1, tl.int32)
    if tl.max(counts, axis=0) <= LISTED:
        draws = tl.load(chunk_values + each, mask=exists, other=float("-inf"), cache_modifier=".cg")
        drawn_ids = tl.load(chunk_ids + each, mask=exists, other=0x7FFFFFFF, cache_modifier=".cg")
        best, best_id = best_draw(draws, drawn_ids)

        entry = tl.arange(0, BLOCK_CHUNKS * LISTED)
        chunk = entry // LISTED
        of_chunk = tl.load(
            num_listed + chunk, mask=chunk < NUM_CHUNKS, other=0, cache_modifier=".cg"
        )
        is_listed = entry % LISTED < of_chunk
        ids = tl.load(listed_ids + entry, mask=is_listed, other=0, cache_modifier=".cg")
        values = tl.load(
            listed_values + entry, mask=is_listed, other=float("-inf"), cache_modifier=".cg"
        )
        scores = scores_of(values, top, factor)
        stays = is_listed & (scores >= least)
        if p < 1:
            stays = stays & _inside_top_p(values, scores, is_listed, mark, MASS_UNIT)
        words = word_of(ids, position, stream, seed_low, seed_high)
        rough = tl.where(stays, scores.to(tl.float32) + rough_noise(words), float("-inf"))
        best, token = exact_draw(
            *(rough, ids, source, top, factor),
            *(position, stream, seed_low, seed_high, best, best_id),
        )
    return token


@triton.jit
def _inside_top_p(values, scores, is_listed, mark, MASS_UNIT: tl.constexpr):
    """Which of the listed ids, ascending, are inside top-p: those above the border's bucket, and
    the best of the bucket until they hold what is wanted of it."""
    wanted, shift = tl.load(mark), tl.load(mark + 2).to(tl.int32)
    border = tl.load(mark + 1).to(tl.int32)
    exponential = tl.exp(scores)
    bucket = below_one(exponential) >> shift
    inside = is_listed & (bucket == border)
    mass = tl.where(inside, mass_of(exponential, MASS_UNIT), 0)
    orders = order_of(values)
    low = tl.min(tl.where(inside, orders, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(tl.where(inside, orders, -0x7FFFFFFF), axis=0).to(tl.int64)
    share = tl.full([], 1.0, tl.float64)  # if nothing is in the bucket
    if low <= high:
        # The largest order with enough mass at or above it. Between `low` and `high` are ids of the
        # mass `left`: one id if that is less than any two have.
        least = tl.min(tl.where(inside, mass, 0x7FFFFFFFFFFFFFFF), axis=0)
        left = tl.sum(mass, axis=0)
        beyond = tl.zeros([], tl.int64)
        while (low < high) & (left >= 2 * least):
            middle = high - (high - low) // 2
            above = tl.sum(tl.where(orders >= middle.to(tl.int32), mass, 0), axis=0)
            is_enough = above >= wanted
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
            left = tl.where(is_enough, above - beyond, left + beyond - above)
            beyond = tl.where(is_enough, beyond, above)
        share = tl.min(tl.where(inside & (orders >= low.to(tl.int32)), exponential, 2.0), axis=0)
    above = tl.sum(tl.where(exponential > share, mass, 0), axis=0)
    at_share = (inside & (exponential == share)).to(tl.int32)
    each = tl.maximum(mass_of(share, MASS_UNIT), 1)
    chosen = inside & (exponential >= share)
    if tl.sum(at_share, axis=0) > 1:  # lower ids stay, until they hold enough
        before = tl.cumsum(at_share, axis=0) - 1
        is_needed = (before == 0) | (before * each < wanted - above)
        chosen = chosen & ((exponential > share) | is_needed)
    return chosen | (is_listed & (bucket < border))
