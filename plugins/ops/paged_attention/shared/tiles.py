"""How attention divides a context: part of the arithmetic, the same for every kernel and step.

A tile is KEYS keys. A work item (`unit`) is a range of tiles whose attention is computed
independently and merged afterwards: UNIT tiles in each of the first 16, then an eighth of the
largest power of two (in tiles) below it, 8 work items per doubling of the context, and MOST_UNIT
tiles from there on. A thread block reads at least one of them, so that more of them keep more
multiprocessors busy with a long context; and each is stored and merged.
"""

from __future__ import annotations

KEYS = 64
UNIT = 1  # a power of two
MOST_UNIT = 8  # a power of two


def count_units(
    num_keys: int, most: int = MOST_UNIT, least: int = UNIT, tile_keys: int = KEYS
) -> int:
    """The number of work items of a context of so many keys. most, least: as of `unit_start`."""
    tile, count = 0, 0
    while tile * tile_keys < num_keys:
        tile += _unit_tiles(tile, most, least)
        count += 1
    return count


def unit_start(unit: int, most: int = MOST_UNIT, least: int = UNIT) -> int:
    """The first tile of a work item, where work items have so many tiles at most and at least."""
    tile = 0
    for _ in range(unit):
        tile += _unit_tiles(tile, most, least)
    return tile


def _unit_tiles(first: int, most: int = MOST_UNIT, least: int = UNIT) -> int:
    """The number of tiles of the work item that begins with this tile."""
    return min(max((1 << first.bit_length()) >> 4, least), most)
