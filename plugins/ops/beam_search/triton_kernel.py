"""A step of a beam search, and beams as a tree, without the host.

Keys are those of plugins/ops/sampling/triton_values.py: they order as logits do, and where these
are equal the smaller id comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.sampling.triton_values import key_order, key_token, order_of, value_of

LARGE: tl.constexpr = tl.constexpr(1e38)  # logits are cut to it, so that no sum is NaN
_ABOVE: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def offer(
    logits,
    keys,
    sums,
    count,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows). keys [rows, chunks, count]: those of a chunk's `count` largest logits,
    the largest first, 0 behind the last; sums [rows, chunks, 2]: the chunk's largest logit, and the
    sum of exponentials behind it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = ids < VOCAB
    values = tl.load(logits + row.to(tl.int64) * VOCAB + ids, mask=exists, other=0.0)
    place = row.to(tl.int64) * tl.num_programs(0) + chunk
    own, largest = weigh_chunk(values, ids, exists, sums, place)
    for nth in range(0, count):
        tl.store(keys + place * count + nth, largest)
        largest = tl.max(tl.where(own < largest, own, 0), axis=0)


@triton.jit
def weigh_chunk(values, ids, exists, sums, place):
    """(keys of a chunk's logits, the largest of them), and what `offer` says of their sums; the
    chunk is the place-th of all."""
    values = tl.where(values != values, -LARGE, tl.minimum(tl.maximum(values, -LARGE), LARGE))
    order = order_of(values).to(tl.int64)
    own = tl.where(exists, ((order + 2147483648) << 31) | (0x7FFFFFFF - ids).to(tl.int64), 0)
    largest = tl.max(own, axis=0)
    top = value_of(key_order(largest))
    tl.store(sums + place * 2, top)
    parts = tl.where(exists, tl.exp(tl.where(exists, values - top, 0.0)), 0.0)
    tl.store(sums + place * 2 + 1, tl.sum(parts, axis=0))
    return own, largest


@triton.jit
def select(
    keys,
    sums,
    scores,
    history,
    new_scores,
    new_history,
    tokens,
    rows,
    step,
    NUM_BEAMS: tl.constexpr,
    BEFORE: tl.constexpr,
    LENGTH: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (requests). The best NUM_BEAMS continuations of BEFORE beams (one row of keys and sums
    each) by score, then beam, then token; `step` tokens of each beam are known. Tokens and the rows
    that they continue are those of the head's next step."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    beam = tl.arange(0, BLOCK_BEAMS)[:, None]
    rank = tl.arange(0, BLOCK_BEAMS)[None, :]
    chunk, entry = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, BLOCK_KEYS)
    totals = tl.full([BLOCK_BEAMS, BLOCK_BEAMS], float("-inf"), tl.float32)
    offered = tl.zeros([BLOCK_BEAMS, BLOCK_BEAMS], tl.int32)
    for own in range(0, BEFORE):
        row = (request * BEFORE + own).to(tl.int64)
        exists = chunk < NUM_CHUNKS
        at = sums + (row * NUM_CHUNKS + chunk) * 2
        tops = tl.load(at, mask=exists, other=-LARGE)
        parts = tl.load(at + 1, mask=exists, other=0.0)
        top = tl.max(tops, axis=0)
        normalizer = top + tl.log(tl.sum(parts * tl.exp(tops - top), axis=0))
        score = tl.zeros([], tl.float32)
        if BEFORE > 1:
            score = tl.load(scores + request * NUM_BEAMS + own)
        found = tl.load(
            keys + row * NUM_CHUNKS * NUM_BEAMS + entry,
            mask=entry < NUM_CHUNKS * NUM_BEAMS,
            other=0,
        )
        largest = tl.max(found, axis=0)
        for nth in range(0, NUM_BEAMS):
            is_there = (beam == own) & (rank == nth) & (largest > 0)
            total = score + (value_of(key_order(largest)) - normalizer)
            totals = tl.where(is_there, total, totals)
            offered = tl.where(is_there, key_token(largest), offered)
            largest = tl.max(tl.where(found < largest, found, 0), axis=0)
    place = beam.to(tl.int64) * VOCAB + offered
    free = totals == totals
    column = tl.arange(0, BLOCK_LENGTH)
    for nth in range(0, NUM_BEAMS):
        left = tl.where(free, totals, float("-inf"))
        best = tl.max(tl.max(left, axis=1), axis=0)
        candidates = tl.where(free & (left == best), place, _ABOVE)
        chosen = tl.min(tl.min(candidates, axis=1), axis=0)
        free = free & (place != chosen)
        parent = (chosen // VOCAB).to(tl.int32)
        token = (chosen % VOCAB).to(tl.int32)
        to = request * NUM_BEAMS + nth
        tl.store(new_scores + to, best)
        tl.store(tokens + to, token)
        tl.store(rows + to, request * BEFORE + parent)
        known = tl.load(
            history + (request * NUM_BEAMS + parent) * LENGTH + column, mask=column < step, other=0
        )
        known = tl.where(column == step, token, known)
        tl.store(new_history + to * LENGTH + column, known, mask=column <= step)


@triton.jit
def merge(
    history,
    places,
    drafts,
    parents,
    counts,
    length,
    NUM_BEAMS: tl.constexpr,
    LENGTH: tl.constexpr,
    MAX_DRAFT_LEN: tl.constexpr,
    BLOCK_BEAMS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (requests). Beams of `length` tokens as a tree: of tokens behind the same tokens one is
    kept, that of the first beam, beam after beam. parents: the node that a draft follows, 0 is the
    root; counts: how many drafts there are. places [requests, beams, LENGTH] is scratch."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    beam, column = tl.arange(0, BLOCK_BEAMS), tl.arange(0, BLOCK_LENGTH)
    exists = (beam[:, None] < NUM_BEAMS) & (column[None, :] < length)
    at = (request * NUM_BEAMS + beam[:, None]) * LENGTH + column[None, :]
    tokens = tl.load(history + at, mask=exists, other=-1)
    owner = beam[:, None] + column[None, :] * 0
    before = owner  # of the token before
    for other in range(0, NUM_BEAMS):
        row = history + (request * NUM_BEAMS + other) * LENGTH + column
        theirs = tl.load(row, mask=column < length, other=-1)
        equal = (tokens == theirs[None, :]).to(tl.int32)
        same = tl.cumsum(equal, axis=1)
        owner = tl.where((same == column[None, :] + 1) & (other < owner), other, owner)
        before = tl.where((same - equal == column[None, :]) & (other < before), other, before)
    kept = (exists & (owner == beam[:, None])).to(tl.int32)
    own = tl.sum(kept, axis=1)
    node = (tl.cumsum(own, axis=0) - own)[:, None] + tl.cumsum(kept, axis=1)
    is_kept = kept != 0
    tl.store(places + at, node, mask=is_kept)
    tl.debug_barrier()
    above = (request * NUM_BEAMS + before) * LENGTH + column[None, :] - 1
    parent = tl.load(places + above, mask=is_kept & (column[None, :] > 0), other=0)
    to = request * MAX_DRAFT_LEN + node - 1
    tl.store(drafts + to, tokens, mask=is_kept)
    tl.store(parents + to, parent, mask=is_kept)
    tl.store(counts + request, tl.sum(own, axis=0))
