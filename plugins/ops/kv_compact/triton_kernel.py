"""Keys and values of accepted paths, moved within the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def compact(
    cache,
    starts,
    moves,
    num_blocks,
    HEADS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread block does all moves of one request in one head's keys, or values, of one layer.
    Grid: layers * 2 * HEADS, requests.

    MOVES of them are read before any of them is written, and what a later one reads is written by
    none before it (reference.py).
    """
    if PDL:
        gdc_wait()
    plane = tl.program_id(0)
    layer, part = plane // (2 * HEADS), plane % (2 * HEADS)
    first = tl.load(starts + tl.program_id(1))
    end = tl.load(starts + tl.program_id(1) + 1)
    word = tl.arange(0, WIDTH)
    for begin in tl.range(first, end, MOVES):
        move = begin + tl.arange(0, MOVES)
        there = move < end
        source = tl.load(moves + 2 * move, mask=there, other=0)
        target = tl.load(moves + 2 * move + 1, mask=there, other=0)
        mask = there[:, None] & (word < WORDS)[None, :]
        from_row = _row(layer, source, part, num_blocks, HEADS, TOKENS_PER_BLOCK)
        to_row = _row(layer, target, part, num_blocks, HEADS, TOKENS_PER_BLOCK)
        held = tl.load(cache + from_row[:, None] * WORDS + word[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(cache + to_row[:, None] * WORDS + word[None, :], held, mask=mask)


@triton.jit
def _row(layer, slot, part, num_blocks, HEADS: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr):
    """Which key of the cache, counted in keys of one head, a slot has in one part of a layer."""
    block = layer.to(tl.int64) * num_blocks + slot // TOKENS_PER_BLOCK
    return (block * (2 * HEADS) + part) * TOKENS_PER_BLOCK + slot % TOKENS_PER_BLOCK
