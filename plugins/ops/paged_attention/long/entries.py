"""How many work items of a context are stored where thread blocks of `long.cu` share it: it follows
from where the first share ends (`Share::border` and `Place::put_helped`)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate, pairwise

from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, MOST_UNIT, count_units, unit_start

WINDOW_TILES = 3  # from a tree's root's on
TAIL_TILES = 15  # of a context that take as long in long.cu as what follows a tree's root


def most_entries(tiles: int, splits: int, has_trees: bool, helped: bool = False) -> int:
    """Of a context of up to so many tiles: the work items of all shares but the first, and one.
    helped: where the first one may be shorter."""
    return _entries(1 << tiles.bit_length(), splits, has_trees, helped)[tiles]


@lru_cache(maxsize=256)
def _entries(tiles: int, splits: int, has_trees: bool, helped: bool) -> tuple[int, ...]:
    """`most_entries` of fewer tiles."""
    starts = [unit_start(unit) for unit in range(count_units(tiles * KEYS) + 2)]
    units = [bisect_left(starts, each) for each in range(tiles)]
    tiles_of = [end - start for start, end in pairwise(starts)]

    def costs(one: int, scale: int, end: int) -> tuple[list[int], list[int]]:
        """What work items take, and all before each of them (`Costs`)."""
        its = [one if n == 1 else 2 * scale * n + end * (n < MOST_UNIT) for n in tiles_of]
        return its, list(accumulate(its, initial=0))

    its_costs, ends = costs(3, 1, 1)
    stored_costs, stored_ends = costs(7, 2, 2)
    merged_ends = costs(5, 2, 2)[1]

    def unit_of(tile: int) -> int:
        return bisect_right(starts, tile) - 1

    def cost(tile: int, its: list[int], before: list[int]) -> int:
        unit = unit_of(tile)
        return before[unit] + (tile - starts[unit]) * its[unit] // tiles_of[unit]

    def border(each: int, nth: int) -> int:
        """The work item that a share begins with (`Share::border`)."""
        last = unit_of(each)
        if has_trees or each <= splits * MOST_UNIT:
            return min(unit_of((each + TAIL_TILES * has_trees) * nth // splits), last)
        most = _round_up(-(-each // splits))
        from_end = min(_round_up(each) - (splits - nth) * most, starts[last])
        target = cost(each, its_costs, ends) * nth // splits
        from_cost = min(bisect_right(ends, target) - 1, last)
        return max(from_cost, unit_of(from_end))

    firsts = [border(each, 1) for each in range(tiles)]
    if helped:  # at least what takes no longer than the last share (`Place::put_helped`)
        for each in range(tiles):
            last_share = (
                cost(each, stored_costs, stored_ends) - stored_ends[border(each, splits - 1)]
            )
            firsts[each] = min(firsts[each], bisect_right(merged_ends, last_share) - 1)
    behind = range(WINDOW_TILES + 1) if has_trees else (0,)
    found = [1 + max(units[n] - firsts[max(n - b, 0)] for b in behind) for n in range(tiles)]
    return tuple(accumulate(found, max))


def _round_up(tiles: int) -> int:
    return -(-tiles // MOST_UNIT) * MOST_UNIT
