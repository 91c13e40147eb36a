"""Whether the waits of `fused/decoder_layers` end in any order of events: a model of a ring.

    python -m scripts.profile.ring_model [--seeds 12] [--held 1] [--full-alone]

The copying warps of copy.cuh, the two teams of product.cuh, and what comes of copies, run in random
order, some 5 or 20 times as often as others. A barrier tells its parity and no more. Waiting for
other CTAs is left out: those always answer. Reports for shapes and shares of a CTA how many of the
runs deadlocked, and ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import random
import sys
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate

SHAPES = {  # weight rows and K of the four products, and weight rows of a group
    "1b": ((3072, 2048, 16), (2048, 2048, 16), (16384, 2048, 16), (2048, 8192, 8)),
    "3b": ((5120, 3072, 16), (3072, 3072, 8), (16384, 3072, 16), (3072, 8192, 8)),
    "8b": ((6144, 4096, 16), (4096, 4096, 8), (28672, 4096, 16), (4096, 14336, 8)),
    "narrow": ((768, 512, 16), (512, 512, 8), (4096, 512, 16), (512, 2048, 8)),
}
PACE = (4, 4, 6)  # chunks on their way: small products, gate and up's first units, the rest
STAGES, CHUNKS, LAYERS, BLOCKS = 6, 4, 4, 132
STUCK = 20_000  # turns without an event


class AnotherTurn(Exception):
    """Somebody takes a unit before it is there: its barrier tells of two turns ago."""


class Barrier:
    """Phases that are complete, of `count` arrivals each. All arrivals anywhere are counted in
    `tally[0]`."""

    def __init__(self, tally: list[int], count: int = 1) -> None:
        self.tally, self.count, self.arrived, self.phases = tally, count, 0, 0

    def arrive(self) -> None:
        """The last one completes a phase."""
        self.tally[0] += 1
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1

    def is_over(self, turn: int) -> bool:
        """As `mbarrier.try_wait.parity` answers for the phase of a turn."""
        return self.phases % 2 != turn % 2

    def meet(self) -> Iterator[None]:
        """Arrive, and wait for all."""
        phase = self.phases
        self.arrive()
        while self.phases == phase:
            yield


class Block:
    """A thread block whose layers have so many units of each product."""

    def __init__(
        self,
        units: tuple[int, ...],
        held: int = 0,
        full_alone: bool = False,
        stages: int = STAGES,
        pace: tuple[int, int, int] = PACE,
        ahead: int = 0,
    ) -> None:
        """`ahead`: units that a team takes out of the ring before a product's tokens are there."""
        self.units, self.held, self.full_alone = units, held, full_alone
        self.stages, self.pace, self.ahead = stages, pace, ahead
        self.tally = tally = [0]
        self.full = [[Barrier(tally) for _ in range(CHUNKS)] for _ in range(stages)]
        self.empty = [Barrier(tally) for _ in range(stages)]
        self.there: dict[tuple[int, int], int] = {}  # which unit's chunk a slot has
        self.under_way: list[tuple[int, int]] = []
        self.meeting, self.done = Barrier(tally, 2), Barrier(tally, 3)
        self.tokens, self.sums = Barrier(tally, 3), Barrier(tally, 3)

    def copy(self, chunk: int) -> Iterator[None]:
        """A warp of copy.cuh."""
        number = 0
        for product in list(range(4)) * LAYERS:
            for unit in range(self.units[product]):
                ahead = product == 2 and unit < self.stages
                most = self.pace[0 if product < 2 else 1 if ahead else 2]
                turn, slot = divmod(number, self.stages)
                while turn and not self.empty[slot].is_over(turn - 1):
                    yield
                behind, its = divmod(CHUNKS * number + chunk - most, CHUNKS)
                while behind >= 0 and not self._came(behind, its):
                    yield
                self.under_way.append((number, chunk))
                number += 1
                yield

    def _came(self, unit: int, chunk: int) -> bool:
        turn, slot = divmod(unit, self.stages)
        is_used = self.empty[slot].is_over(turn) and not self.full_alone
        return is_used or self.full[slot][chunk].is_over(turn)

    def _use(self, number: int) -> Iterator[None]:
        turn, slot = divmod(number, self.stages)
        for chunk in range(CHUNKS):
            while not self.full[slot][chunk].is_over(turn):
                yield
            if self.there.get((slot, chunk)) != number:
                raise AnotherTurn
        yield
        self.empty[slot].arrive()

    def multiply(self, team: int) -> Iterator[None]:
        """A team of product.cuh."""
        taken = 0
        for product in list(range(4)) * LAYERS:
            held = self.held if product == 2 else 0
            units = range(held + ((team ^ taken ^ held) & 1), self.units[product], 2)
            for unit in units[: self.ahead]:
                yield from self._use(taken + unit)
            yield from (self.tokens if held else self.meeting).meet()
            for unit in units[self.ahead :]:
                yield from self._use(taken + unit)
            taken += self.units[product]
            yield from (self.sums if held else self.meeting).meet()
            if product == 0 and self.held:
                self.done.arrive()

    def hold(self) -> Iterator[None]:
        """The warps of 30e0049 that hold units."""
        number = sum(self.units[:2])
        for _ in range(LAYERS):
            yield from self.done.meet()
            for unit in range(self.held):
                yield from self._use(number + unit)
            yield from self.tokens.meet()
            self.sums.arrive()
            number += sum(self.units)

    def ends(self, seed: int) -> bool:
        """Whether everyone comes to the end. Raises AnotherTurn."""
        rng = random.Random(seed)
        actors = [self.copy(chunk) for chunk in range(CHUNKS)]
        actors += [self.multiply(team) for team in range(2)] + [self.hold()] * (self.held > 0)
        speeds = [rng.choice((1, 1, 1, 5, 20)) for _ in actors]
        limits = list(accumulate(speeds))
        quiet, last = 0, -1
        while actors:
            at = bisect(limits, rng.random() * limits[-1])
            if next(actors[at], self) is self:
                del actors[at], speeds[at]
                limits = list(accumulate(speeds))
            if self.under_way and rng.random() < 0.3:
                number, chunk = self.under_way.pop(rng.randrange(min(len(self.under_way), 6)))
                self.there[number % self.stages, chunk] = number
                self.full[number % self.stages][chunk].arrive()
            events = len(actors) + 100 * self.tally[0] + len(self.under_way)
            quiet, last = (quiet + 1, last) if events == last else (0, events)
            if quiet > STUCK and not self.under_way:
                return False
        return True


def shares(shape: tuple[tuple[int, int, int], ...]) -> list[tuple[int, ...]]:
    """Units of each product that blocks have, all kinds (`Size` and `Share` of chain.cuh)."""
    found, turn, products = set(), 0, []
    for rows, inner, group_rows in shape:
        products.append((rows // group_rows, -(-inner // 512 * group_rows // 64), turn))
        turn = (turn + rows // group_rows) % BLOCKS
    for block in range(BLOCKS):
        firsts = [(groups, units, (block - turn) % BLOCKS) for groups, units, turn in products]
        found.add(tuple(-(-max(g - first, 0) // BLOCKS) * units for g, units, first in firsts))
    return sorted(found)


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--held", type=int, default=0)
    parser.add_argument("--full-alone", action="store_true")
    arguments = parser.parse_args()
    stuck = 0
    for name, shape in SHAPES.items():
        for units in shares(shape):
            if units[2] < arguments.held:
                continue
            block = [
                Block(units, arguments.held, arguments.full_alone).ends(seed)
                for seed in range(arguments.seeds)
            ]
            stuck += block.count(False)
            print(f"{name}, units {units}: {block.count(False)} of {len(block)} got stuck")
    sys.exit(stuck > 0)


if __name__ == "__main__":
    main()
