"""Triton's arithmetic of tiles and work items, one tile a program."""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.plugins.ops.paged_attention.triton.tiles import next_unit, unit_index, unit_start


@triton.jit
def describe_tiles(out):
    """out[tile] = [units that end at or before it, its unit's first tile, the next first tile]."""
    tile = tl.program_id(0)
    tl.store(out + 3 * tile, unit_index(tile))
    tl.store(out + 3 * tile + 1, unit_start(tile))
    tl.store(out + 3 * tile + 2, next_unit(tile))
