"""Reads an array and does next to nothing with it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(
    source,
    out,
    num_tiles,
    IN_TURNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[b * TILE + i]: the exclusive or of number i of all tiles of thread block b."""
    block = tl.program_id(0).to(tl.int64)  # so that offsets are 64 bits
    blocks = tl.num_programs(0)
    found = tl.zeros((TILE,), tl.int32)
    offsets = tl.arange(0, TILE)
    if IN_TURNS:
        first = block
        end = num_tiles
        step = blocks
    else:
        share = tl.cdiv(num_tiles, blocks)
        first = tl.minimum(block * share, num_tiles)
        end = tl.minimum(first + share, num_tiles)
        step = 1
    for tile in tl.range(first, end, step, num_stages=STAGES):
        found ^= tl.load(source + tile * TILE + offsets)
    tl.store(out + block * TILE + offsets, found)
