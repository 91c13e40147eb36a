"""Tiles of keys, and the work items (`unit`) that they form (shared/tiles.py defines them, in
integers)."""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.plugins.ops.paged_attention.shared import tiles

KEYS: tl.constexpr = tl.constexpr(tiles.KEYS)
UNIT: tl.constexpr = tl.constexpr(tiles.UNIT)
MOST_UNIT: tl.constexpr = tl.constexpr(tiles.MOST_UNIT)
_LAST_OCTAVE: tl.constexpr = tl.constexpr(
    8 * tiles.MOST_UNIT
)  # tiles where the largest units begin
_BASE_OCTAVE: tl.constexpr = tl.constexpr(tiles.UNIT.bit_length() - 1)


@triton.jit
def highest_bit(value):
    """The largest power of two up to value; 0 for 0. Values below 2^16."""
    value = value | (value >> 1)
    value = value | (value >> 2)
    value = value | (value >> 4)
    value = value | (value >> 8)
    return value - (value >> 1)


@triton.jit
def unit_size(tile):
    """Tiles in the unit that holds this tile."""
    return tl.minimum(tl.maximum(highest_bit(tile) >> 3, UNIT), MOST_UNIT)


@triton.jit
def unit_start(tile):
    """The first tile of the unit that holds this tile."""
    return tile & -unit_size(tile)


@triton.jit
def starts_unit(tile):
    """Whether this tile is the first of its unit."""
    return unit_start(tile) == tile


@triton.jit
def next_unit(tile):
    """The first tile at or after this one that starts a unit."""
    size = unit_size(tile)
    return (tile + size - 1) & -size


@triton.jit
def unit_index(tile):
    """How many units end at or before this tile."""
    top = tl.minimum(highest_bit(tile), _LAST_OCTAVE)
    # The exponent of a power of two, as a float32 has it.
    octave = tl.maximum((tl.cast(tl.cast(top, tl.float32), tl.int32, bitcast=True) >> 23) - 131, 0)
    later = 8 * octave + 16 + ((tile - top) // tl.maximum(top >> 3, 1)) - 8 * _BASE_OCTAVE
    return tl.where(tile < 16 * UNIT, tile // UNIT, later)


@triton.jit
def keys_of(tile):
    """The positions of a tile's keys."""
    return tl.arange(0, KEYS) + tile * KEYS


@triton.jit
def skip_to(first_tile, sinks):
    """Where a range of tiles begins, and how many tiles of sinks come before it, once those that
    hold neither a sink nor a key from `first_tile` on are passed over."""
    sink_tiles = (sinks + KEYS - 1) // KEYS
    has_gap = first_tile > sink_tiles
    return tl.where(has_gap, first_tile, 0), tl.where(has_gap, sink_tiles, 0)


@triton.jit
def tile_at(step, begin, before, HAS_SINKS: tl.constexpr):
    """The tile of a loop's step: from `begin` on the step itself, in the `before` steps ahead of
    it the first tiles."""
    tile = step
    if HAS_SINKS:
        tile = tl.where(step < begin, step - begin + before, step)
    return tile


@triton.jit
def ends_unit(tile, next_tile, HAS_SINKS: tl.constexpr):
    """Whether the tile is the last of its unit, or of what a loop takes of it."""
    if HAS_SINKS:
        return unit_start(next_tile) != unit_start(tile)
    else:
        return starts_unit(tile + 1)


@triton.jit
def load_pages(table, tile, limit, TOKENS_PER_BLOCK: tl.constexpr):
    """The cache block of each of a tile's keys; 0 for keys from `limit` on."""
    key = keys_of(tile)
    return tl.load(table + key // TOKENS_PER_BLOCK, mask=key < limit, other=0)


@triton.jit
def load_tile(
    cache,
    pages,
    tile,
    limit,
    HEADS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys and values [KEYS, WIDTH] of one head, whose first block is at `cache`."""
    key = keys_of(tile)
    return load_keys(cache, pages, key, key < limit, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)


@triton.jit
def load_keys(
    cache,
    pages,
    place,
    is_there,
    HEADS: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The same of keys at these places of a request's cache; zeros for those that are not there."""
    one: tl.constexpr = HEADS * TOKENS_PER_BLOCK * SIZE  # elements of a block's keys
    row = pages.to(tl.int64) * (2 * one) + (place % TOKENS_PER_BLOCK) * SIZE
    dims = tl.arange(0, WIDTH)
    mask = is_there[:, None]
    if WIDTH != SIZE:
        mask = mask & (dims < SIZE)[None, :]
    pointers = cache + row[:, None] + dims[None, :]
    k = tl.load(pointers, mask=mask, other=0.0)
    v = tl.load(pointers + one, mask=mask, other=0.0)
    return k, v
