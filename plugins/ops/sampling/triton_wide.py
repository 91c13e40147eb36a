"""Top-p and min-p without top-k by all chunks of a row: they may keep most of the vocabulary.

`weigh` adds up exp(score) of all ids in buckets of its float32 bits, as integers, and finds the
bucket in which the mass that top-p wants is reached. `sift` draws from the ids above that bucket
and lists the few in it; the last chunk to finish looks at those exactly and stores the token. The
same for the border of min-p. A row where a list overflows (thousands of equal logits) is left to
`finish`, which decides by the same sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.sampling.triton_border import LINE, below_one, border_bucket, settle
from llmctl.plugins.ops.sampling.triton_filter import mass_of, wanted_mass
from llmctl.plugins.ops.sampling.triton_values import (
    LOWEST,
    chunk_words,
    exact_draw,
    key_order,
    per_unit,
    rough_noise,
    scores_of,
    value_of,
)

_BUCKET_BITS: tl.constexpr = tl.constexpr(12)


@triton.jit
def _is_wide(request, greedy, top_k, top_p, min_p, VOCAB: tl.constexpr):
    k = tl.load(top_k + request)
    filters = (tl.load(top_p + request) < 1) | (tl.load(min_p + request) > 0)
    return filters & ((k <= 0) | (k >= VOCAB)) & (tl.load(greedy + request) == 0)


@triton.jit
def _log_below_one(distance):
    """The logarithm of the float32 that lies so far below 1."""
    return tl.log((0x3F800000 - distance).to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit
def _slack(score):
    """More than float32 can be wrong about a score."""
    return 1e-6 * (1 + tl.abs(score))


@triton.jit
def weigh(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    greedy,
    chunk_keys,
    chunk_values,
    arrivals,
    histogram,
    totals,
    borders,
    marks,
    per_request,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    MASS_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows). Buckets reach down to a share that cannot be inside top-p."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    chunk, row = tl.program_id(0), tl.program_id(1)
    request = row // per_request
    if _is_wide(request, greedy, top_k, top_p, min_p, VOCAB):
        each = tl.arange(0, BLOCK_CHUNKS)
        exists = each < NUM_CHUNKS
        keys = tl.load(chunk_keys + row * NUM_CHUNKS + each, mask=exists, other=0)
        top = value_of(key_order(tl.max(keys, axis=0)))
        border = borders + row * 4
        if chunk == 0:
            tl.store(border + 2, top)
        if top >= LOWEST:
            factor = per_unit(tl.load(temperature + request))
            p = tl.load(top_p + request)
            least = tl.log(tl.load(min_p + request))
            low = tl.where(least >= LOWEST, least - _slack(least), float("-inf"))
            high = tl.where(least >= LOWEST, least + _slack(least), float("-inf"))
            if p < 1:
                tops = value_of(key_order(keys))
                used = exists & (tops >= LOWEST)
                sums = tl.load(chunk_values + row * NUM_CHUNKS + each, mask=used, other=0.0)
                about = tl.sum(sums * tl.exp(scores_of(tops, top, factor)), axis=0)
                # ids below this share hold less than 1 - p together
                bound = tl.minimum(tl.maximum(0.99 * (1 - p) * about / VOCAB, 1e-30), 1.0)
                span = below_one(bound)
                width = tl.sum(((span >> tl.arange(0, 32)) > 0).to(tl.int32), axis=0)
                shift = tl.maximum(width - _BUCKET_BITS, 0)
                last = span >> shift
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                source = logits + row.to(tl.int64) * VOCAB
                values = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))
                exponential = tl.exp(scores_of(values, top, factor))
                mass = mass_of(exponential, MASS_UNIT)
                tl.atomic_add(totals + row, tl.sum(mass, axis=0), sem="relaxed")
                bucket = below_one(exponential) >> shift
                inside = (bucket >= 0) & (bucket <= last)
                buckets = histogram + row.to(tl.int64) * (LINE * LINE)
                tl.atomic_add(buckets + bucket, mass, mask=inside, sem="relaxed")
                tl.debug_barrier()  # every thread's masses are on their way
                if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == NUM_CHUNKS - 1:
                    tl.store(arrivals + row, 0)
                    zero = tl.zeros([], tl.int64)
                    total = tl.atomic_xchg(totals + row, zero, sem="relaxed")
                    wanted = wanted_mass(total.to(tl.float64) / MASS_UNIT, p, MASS_UNIT)
                    found, rest = border_bucket(buckets, wanted)
                    found = tl.minimum(found, last)
                    tl.store(marks + row * 4, rest)
                    tl.store(marks + row * 4 + 1, found.to(tl.int64))
                    tl.store(marks + row * 4 + 2, shift.to(tl.int64))
                    upper = _log_below_one(found << shift)
                    lower = _log_below_one(((found + 1) << shift) - 1)
                    low = tl.maximum(low, lower - _slack(lower))
                    high = tl.maximum(high, upper + _slack(upper))
                    tl.store(border, low.to(tl.float32))
                    tl.store(border + 1, high.to(tl.float32))
            elif chunk == 0:
                tl.store(border, low.to(tl.float32))
                tl.store(border + 1, high.to(tl.float32))


@triton.jit
def sift(
    logits,
    out,
    temperature,
    top_k,
    top_p,
    min_p,
    seed_low,
    seed_high,
    stream,
    greedy,
    positions,
    chunk_values,
    chunk_ids,
    arrivals,
    settled,
    borders,
    marks,
    num_listed,
    listed_ids,
    listed_values,
    per_request,
    first,
    stride,
    offset,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    MASS_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows). Ids are above the border, or near it, or not looked at again."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    chunk, row = tl.program_id(0), tl.program_id(1)
    request = row // per_request
    if _is_wide(request, greedy, top_k, top_p, min_p, VOCAB):
        top = tl.load(borders + row * 4 + 2)
        if top >= LOWEST:
            low, high = tl.load(borders + row * 4), tl.load(borders + row * 4 + 1)
            factor = per_unit(tl.load(temperature + request))
            position = tl.load(positions + request) + first + row % per_request
            which = tl.load(stream + request)
            word_low, word_high = tl.load(seed_low + request), tl.load(seed_high + request)
            source = logits + row.to(tl.int64) * VOCAB
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))
            scores = scores_of(values, top, factor).to(tl.float32)
            place = row * NUM_CHUNKS + chunk

            is_near = ((scores >= low) & (scores <= high)).to(tl.int32)
            count = tl.sum(is_near, axis=0)
            tl.store(num_listed + place, count)
            if count > 0:
                entry = tl.cumsum(is_near, axis=0) - 1
                fits = (is_near > 0) & (entry < LISTED)
                tl.store(listed_ids + place * LISTED + entry, ids, mask=fits)
                tl.store(listed_values + place * LISTED + entry, values, mask=fits)

            words = chunk_words(chunk * CHUNK, position, which, word_low, word_high, CHUNK)
            rough = tl.where(scores > high, scores + rough_noise(words), float("-inf"))
            best = tl.full([], float("-inf"), tl.float64)
            best_id = tl.full([], 0x7FFFFFFF, tl.int32)
            best, best_id = exact_draw(
                rough, ids, source, top, factor, position, which, word_low, word_high, best, best_id
            )
            tl.store(chunk_values + place, best)
            tl.store(chunk_ids + place, best_id)
            tl.debug_barrier()  # every thread's entries are on their way
            if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == NUM_CHUNKS - 1:
                tl.store(arrivals + row, 0)
                p, least = tl.load(top_p + request), tl.log(tl.load(min_p + request))
                token = settle(
                    *(source, top, factor, p, least, position, which, word_low, word_high),
                    *(chunk_values + row * NUM_CHUNKS, chunk_ids + row * NUM_CHUNKS),
                    *(num_listed + row * NUM_CHUNKS, listed_ids + row * NUM_CHUNKS * LISTED),
                    *(listed_values + row * NUM_CHUNKS * LISTED, marks + row * 4),
                    *(NUM_CHUNKS, BLOCK_CHUNKS, LISTED, MASS_UNIT),
                )
                if token >= 0:
                    tl.store(out + row * stride + offset, token)
                    tl.store(settled + row, 1)
