"""Argmax and draws from rows of logits: plugins/ops/sampling/spec.py on the device.

`scan` reads a row in chunks, one thread block each: the largest logit of the chunk and of each
group of ids, and, for a row without filters, the best draw of the chunk. `finish` has one thread
block per row: it joins the chunks, and where filters decide which ids may be drawn it reads the few
groups that can hold them. Filters that may keep much of the vocabulary are first tried by all
chunks together (triton_wide.py).

What decides is float64 or integers, and every sum is of integers or in one order, so a row's token
depends on nothing but its logits and its request's parameters. float32 only chooses what is looked
at exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.sampling.triton_filter import filtered
from llmctl.plugins.ops.sampling.triton_values import (
    LOWEST,
    best_key,
    best_sum,
    chunk_words,
    key_order,
    key_token,
    per_unit,
    plain_draw,
    rough_noise,
    scores_of,
    value_of,
)


@triton.jit
def argmax(
    logits,
    out,
    keys,
    stride,
    offset,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows): out[row * stride + offset] = the row's best id."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    knows, token = best_of_row(logits, keys, VOCAB, CHUNK, BLOCK_CHUNKS)
    if knows:
        tl.store(out + tl.program_id(1) * stride + offset, token)


@triton.jit
def best_of_row(logits, keys, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """See `best_of_chunks`: of a row of `logits`."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    first = logits + row.to(tl.int64) * VOCAB
    values = tl.load(first + ids, mask=ids < VOCAB, other=float("-inf"))
    return best_of_chunks(best_key(values, ids), keys, VOCAB, CHUNK, BLOCK_CHUNKS)


@triton.jit
def best_of_chunks(key, keys, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """(whether this thread block of a grid (chunks, rows) knows its row's best id, that id). key:
    that of its own chunk.

    The block of the last chunk does: it waits for the others' keys, of which none is 0, and clears
    their places. A key says itself that it is there, so nothing has to be counted behind it. Who is
    waited for came before, for blocks start in the order of their numbers.
    BLOCK_CHUNKS: as many as threads at least, so that each place is one's to read and clear.
    """
    NUM_CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    chunk = tl.program_id(0)
    places = keys + tl.program_id(1) * NUM_CHUNKS
    knows = chunk == NUM_CHUNKS - 1
    token = tl.full([], -1, tl.int32)
    if knows:
        place = places + tl.arange(0, BLOCK_CHUNKS)
        is_other = tl.arange(0, BLOCK_CHUNKS) < NUM_CHUNKS - 1
        others = tl.load(place, mask=is_other, other=1, volatile=True)
        while tl.min(others, axis=0) == 0:
            others = tl.load(place, mask=is_other, other=1, volatile=True)
        tl.store(place, tl.zeros_like(others), mask=is_other)
        token = key_token(tl.maximum(tl.max(others, axis=0), key))
    else:
        tl.store(places + chunk, key)
    return knows, token


@triton.jit
def scan(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed_low,
    seed_high,
    stream,
    greedy,
    positions,
    chunk_keys,
    chunk_values,
    chunk_rests,
    chunk_ids,
    group_tops,
    per_request,
    first,
    first_id,
    OWN: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows). chunk_values: without filters the best draw, with what it leaves in
    chunk_rests (`exact_sum`); for top-p without top-k about the sum of exp(score), relative to the
    chunk's own best. OWN: ids in a row, from `first_id` on; fewer than VOCAB of a rank's share."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_GROUPS: tl.constexpr = (VOCAB + GROUP - 1) // GROUP
    chunk, row = tl.program_id(0), tl.program_id(1)
    source = logits + row.to(tl.int64) * OWN + chunk * CHUNK
    places = tl.arange(0, CHUNK)
    own = tl.minimum(OWN, VOCAB - first_id)  # behind them is padding
    values = tl.load(source + places, mask=chunk * CHUNK + places < own, other=float("-inf"))
    begin = first_id + chunk * CHUNK
    key = best_key(values, begin + places)
    place = row * tl.num_programs(0) + chunk
    tl.store(chunk_keys + place, key)

    request = row // per_request
    if tl.load(greedy + request) == 0:
        k = tl.load(top_k + request)
        has_top_k = (k > 0) & (k < VOCAB)
        has_top_p = tl.load(top_p + request) < 1
        is_filtered = has_top_k | has_top_p | (tl.load(min_p + request) > 0)
        factor = per_unit(tl.load(temperature + request))
        if is_filtered:
            tops = tl.max(tl.reshape(values, [CHUNK // GROUP, GROUP]), axis=1)
            group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            to = group_tops + row.to(tl.int64) * NUM_GROUPS + group
            tl.store(to, tops, mask=group < NUM_GROUPS)
        top = value_of(key_order(key))
        if top >= LOWEST:  # not for chunks of banned ids, nor for NaN
            if not is_filtered:
                position = tl.load(positions + request) + first + row % per_request
                low, high = tl.load(seed_low + request), tl.load(seed_high + request)
                which = tl.load(stream + request)
                words = chunk_words(begin, position, which, low, high, CHUNK)
                rough = scores_of(values, top, factor).to(tl.float32) + rough_noise(words)
                best, rest, best_id = plain_draw(
                    rough, begin, source, factor, position, which, low, high, CHUNK
                )
                tl.store(chunk_values + place, best)
                tl.store(chunk_rests + place, rest)
                tl.store(chunk_ids + place, best_id)
            elif has_top_p & (not has_top_k):
                scores = scores_of(values, top, factor).to(tl.float32)
                tl.store(chunk_values + place, tl.sum(tl.exp(scores), axis=0).to(tl.float64))


@triton.jit
def finish(
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
    chunk_keys,
    chunk_values,
    chunk_rests,
    chunk_ids,
    group_tops,
    groups,
    ids,
    values,
    masses,
    settled,
    per_request,
    first,
    stride,
    offset,
    rows,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    MASS_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every thread block has scratch for candidates and takes one row after another, except those
    whose token `sift` has stored."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    NUM_GROUPS: tl.constexpr = (VOCAB + GROUP - 1) // GROUP
    slot = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    exists = chunk < NUM_CHUNKS
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        is_settled = tl.load(settled + row) != 0
        tl.debug_barrier()  # every thread has read it
        tl.store(settled + row, 0)
        if not is_settled:
            keys = tl.load(chunk_keys + row * NUM_CHUNKS + chunk, mask=exists, other=0)
            key = tl.max(keys, axis=0)
            token = key_token(key)
            top = value_of(key_order(key))
            request = row // per_request
            wide_row = tl.cast(row, tl.int64)
            if (tl.load(greedy + request) == 0) & (top >= LOWEST):
                warmth = tl.load(temperature + request)
                factor = per_unit(warmth)
                k = tl.load(top_k + request)
                p = tl.load(top_p + request)
                least = tl.load(min_p + request)
                has_top_k = (k > 0) & (k < VOCAB)
                is_filtered = has_top_k | (p < 1) | (least > 0)
                # Chunks of banned ids have stored nothing.
                used = exists & (value_of(key_order(keys)) >= LOWEST)
                if is_filtered:
                    token = filtered(
                        logits + wide_row * VOCAB,
                        group_tops + wide_row * NUM_GROUPS,
                        groups + slot * NUM_GROUPS,
                        ids + slot * (NUM_GROUPS * GROUP),
                        values + slot * (NUM_GROUPS * GROUP),
                        masses + slot * (NUM_GROUPS * GROUP),
                        top,
                        factor,
                        warmth,
                        k,
                        p,
                        least,
                        tl.load(positions + request) + first + row % per_request,
                        tl.load(stream + request),
                        tl.load(seed_low + request),
                        tl.load(seed_high + request),
                        VOCAB,
                        GROUP,
                        BLOCK_GROUPS,
                        TILE,
                        MASS_UNIT,
                    )
                else:
                    place = row * NUM_CHUNKS + chunk
                    drawn = tl.load(chunk_values + place, mask=used, other=float("-inf"))
                    rests = tl.load(chunk_rests + place, mask=used, other=0.0)
                    drawn_ids = tl.load(chunk_ids + place, mask=used, other=0)
                    best, rest, token = best_sum(drawn, rests, drawn_ids)
            tl.store(out + row * stride + offset, token)
