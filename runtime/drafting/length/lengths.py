"""How many tokens each sequence drafts: the same number for all, or the fastest.

`best_lengths` and `best_length` are pure functions of acceptance and costs. They maximise the
tokens per second of the whole step,

    (b + sum over sequences i and depths j <= k_i of a_i^j) / step_s

where a_i is the acceptance probability of sequence i's drafts, given that those before were
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.drafting.length.costs import StepCosts
from llmctl.runtime.request import Sequence

ROUND_LENGTHS = (0, 1, 2, 4, 6, 10, 16, 24, 32)  # lengths of device rounds: one graph each
STALE = 8  # decisions
ITERATIONS = 8  # of Dinkelbach's method, which is done after three or four


def round_lengths(most: int) -> list[int]:
    """The draft lengths that device rounds use if the longest is `most`."""
    return sorted({length for length in ROUND_LENGTHS if length < most} | {most})


class DraftLengths(Protocol):
    """Decides before every step; used by the scheduler and by device rounds."""

    common: int | None  # draft length of all planned sequences; None: lengths differ
    beside_prompts: bool  # whether it also applies to steps with prompts; else these have no drafts

    def plan(self, generation: Items[Sequence]) -> None:
        """Decide for these sequences, which are all that generate in the next step."""

    def of(self, sequence: Sequence) -> int:
        """The most drafts of a sequence in the next step."""


class FixedLengths:
    """`length` drafts for every sequence, always."""

    beside_prompts = True

    def __init__(self, length: int) -> None:
        self.common: int | None = length
        self._length = length

    def plan(self, generation: Items[Sequence]) -> None:
        """Nothing to decide."""

    def of(self, sequence: Sequence) -> int:
        """The same for all."""
        return self._length


def rate(acceptance: NDArray[np.float64], lengths: NDArray[np.int64], costs: StepCosts) -> float:
    """Expected tokens per second of a step: acceptance [b], lengths [b]."""
    batch, depth = len(lengths), int(lengths.max(initial=0))
    reach = _powers(acceptance, depth)
    drafted = np.arange(1, depth + 1) <= lengths[:, None]
    tokens = batch + float(reach[drafted].sum())
    return tokens / costs.step_s(batch, depth, int(lengths.sum()))


def best_length(
    acceptance: NDArray[np.float64], candidates: Items[int], costs: StepCosts
) -> tuple[int, dict[int, float]]:
    """The best common length of b sequences, and the rate of every candidate."""
    batch = len(acceptance)
    gained = np.concatenate([[0.0], np.cumsum(_powers(acceptance, max(candidates)).sum(axis=0))])
    rates = {
        length: (batch + float(gained[length])) / costs.step_s(batch, length, batch * length)
        for length in candidates
    }
    return max(rates, key=lambda length: (rates[length], -length)), rates


def best_lengths(
    acceptance: NDArray[np.float64], most: int, plain_s: float, draft_s: float, token_s: float
) -> NDArray[np.int64]:
    """The best length of each sequence, 0 to `most`, where a step takes plain_s, draft_s for every
    draft of the longest, and token_s for every draft of anybody.

    For a rate R, a draft is worth it if the chance that it is accepted exceeds R times the time it
    adds; the R that such a step has is a better R, until it stays.
    """
    batch = len(acceptance)
    reach = _powers(acceptance, most)
    best = np.zeros(batch, np.int64)
    current = batch / plain_s
    for _ in range(ITERATIONS):
        worth = reach - current * token_s
        gains = np.maximum(worth, 0).sum(axis=0) - current * draft_s
        depth = int(np.cumprod(gains > 0).sum())  # acceptance falls with depth, and so do gains
        lengths = (worth[:, :depth] > 0).sum(axis=1)
        depth = int(lengths.max(initial=0))
        drafted = np.arange(1, depth + 1) <= lengths[:, None]
        tokens = batch + float(reach[:, :depth][drafted].sum())
        step_s = plain_s + depth * draft_s + int(lengths.sum()) * token_s
        if tokens / step_s <= current * (1 + 1e-12):
            break
        best, current = lengths, tokens / step_s
    return best


class LoneLengths:
    """The best length of one sequence that runs alone, of all there are. A plain step takes as long
    as this takes for many, so costs are looked up anew for every STALE decisions."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._seconds: list[float] = []  # of a step, by its drafts
        self._age = 0

    def best(self, acceptance: float, most: int) -> tuple[int, float]:
        """(length, 0 to `most`; expected speed relative to no drafts)."""
        self._age += 1
        if self._age > STALE or most >= len(self._seconds):
            self._age = 0
            self._seconds = [self._costs.step_s(1, n, n) for n in range(most + 1)]
        best, chance, tokens, plain_s = (0, 1.0), 1.0, 1.0, self._seconds[0]
        for length in range(1, most + 1):
            chance *= acceptance
            tokens += chance
            gain = tokens * plain_s / self._seconds[length]
            if gain > best[1]:
                best = (length, gain)
        return best


def _powers(acceptance: NDArray[np.float64], depth: int) -> NDArray[np.float64]:
    """[b, depth]: the chance that drafts 1 to j + 1 are all accepted."""
    chances: NDArray[np.float64] = np.repeat(acceptance[:, None], depth, axis=1)
    return chances.cumprod(axis=1, dtype=np.float64)
