"""What rows of logits offer: their likeliest tokens with log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.beam_search.triton_kernel import LARGE, weigh_chunk
from llmctl.plugins.ops.sampling.triton_values import key_order, key_token, value_of


@triton.jit
def offer(
    logits,
    rows,
    keys,
    sums,
    num_ids,
    count,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks of the first num_ids ids, rows). rows: where in the logits each is. keys and
    sums are those of a beam search's `offer`, but keys are 0 where a logit is not offered, as most
    are where a head has a reduced vocabulary."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = ids < num_ids
    first = logits + tl.load(rows + row).to(tl.int64) * VOCAB
    values = tl.load(first + ids, mask=exists, other=0.0)
    place = row.to(tl.int64) * tl.num_programs(0) + chunk
    own, largest = weigh_chunk(values, ids, exists, sums, place)
    nth = 0
    while (nth < count) & (value_of(key_order(largest)) > -LARGE / 2):
        tl.store(keys + place * count + nth, largest)
        largest = tl.max(tl.where(own < largest, own, 0), axis=0)
        nth += 1
    while nth < count:
        tl.store(keys + place * count + nth, tl.zeros([], tl.int64))
        nth += 1


@triton.jit
def pick(
    keys,
    sums,
    ids,
    log_probs,
    num_chunks,
    count,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows). The `count` likeliest of a row, the likeliest first; -inf for what is no number,
    or was -inf."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk, entry = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, BLOCK_KEYS)
    exists = chunk < num_chunks
    at = sums + (row.to(tl.int64) * num_chunks + chunk) * 2
    tops = tl.load(at, mask=exists, other=-LARGE)
    parts = tl.load(at + 1, mask=exists, other=0.0)
    top = tl.max(tops, axis=0)
    normalizer = top + tl.log(tl.sum(parts * tl.exp(tops - top), axis=0))
    first = keys + row.to(tl.int64) * num_chunks * count
    found = tl.load(first + entry, mask=entry < num_chunks * count, other=0)
    largest = tl.max(found, axis=0)
    for nth in range(0, count):
        logit = value_of(key_order(largest))
        is_offered = (largest > 0) & (logit > -LARGE / 2)
        tl.store(ids + row * count + nth, tl.where(is_offered, key_token(largest), 0))
        tl.store(
            log_probs + row * count + nth,
            tl.where(is_offered, logit - normalizer, float("-inf")),
        )
        largest = tl.max(tl.where(found < largest, found, 0), axis=0)
