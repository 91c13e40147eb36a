"""Where attention cuts a context: part of the arithmetic, the same for every kernel and step.

A tile is KEYS keys. A unit is UNIT tiles in the first 16 units, and then an eighth of the largest
power of two (in tiles) below it: 8 units per doubling of the context.
"""

from __future__ import annotations

KEYS = 64
UNIT = 1  # a power of two


def count_units(num_keys: int) -> int:
    """How many units a context of so many keys has."""
    tile, count = 0, 0
    while tile * KEYS < num_keys:
        tile += _unit_tiles(tile)
        count += 1
    return count


def unit_start(unit: int) -> int:
    """The first tile of a unit."""
    tile = 0
    for _ in range(unit):
        tile += _unit_tiles(tile)
    return tile


def _unit_tiles(first: int) -> int:
    """How many tiles the unit has that begins with this one."""
    return max((1 << first.bit_length()) >> 4, UNIT)
