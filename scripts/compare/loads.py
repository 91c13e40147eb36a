"""What is asked of servers that are compared: requests, their lengths and their pace."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llmctl.cli.bench.driver import Pace
from llmctl.runtime.request import Request

ARRIVALS = "arrivals"
IDS = (100, 4_000)  # ordinary tokens of every model here


@dataclass(frozen=True)
class Schedule(Pace):
    """Requests that come at given times, in seconds."""

    times_s: tuple[float, ...] = ()

    def due_times_s(self, count: int) -> list[float]:
        return list(self.times_s)


@dataclass(frozen=True)
class Load:
    """Requests by (input, output) tokens, and their pace. The first num_watched are measured while
    the others come; 0: all are, all the time."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    pace: Pace
    num_watched: int = 0
    warmup: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def requests(self, shapes: tuple[tuple[int, int], ...], seed: int) -> list[Request]:
        """Random prompts, no two with a common beginning."""
        ids = np.random.default_rng(seed)
        return [
            Request(tuple(ids.integers(*IDS, size).tolist()), count, streaming=True)
            for size, count in shapes
        ]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(size + count for size, count in self.shapes)


def parse_load(text: str) -> Load:
    """One of --loads. Raises ValueError."""
    if text == ARRIVALS:
        return arrivals()
    concurrency, sizes, counts, number = text.split("x")
    inputs, outputs = _lengths(sizes, int(number), 3), _lengths(counts, int(number), 4)
    warmup = tuple((size, 16) for size in inputs[: int(concurrency)])
    name = f"{concurrency} in flight, {_words(sizes)} in / {_words(counts)} out"
    shapes = tuple(zip(inputs, outputs, strict=True))
    return Load(name, shapes, Pace(int(concurrency)), warmup=warmup)


def _bounds(text: str) -> list[int]:
    """The ends of "500-1500", or a fixed length. Raises ValueError."""
    bounds = [int(part) for part in text.split("-")]
    if len(bounds) > 2 or bounds != sorted(bounds):
        raise ValueError(f"{text!r} is neither a length nor a range like 500-1500")
    return bounds


def _lengths(text: str, number: int, seed: int) -> list[int]:
    """So many, evenly distributed, the same for every system."""
    bounds = _bounds(text)
    drawn = np.random.default_rng(seed).integers(bounds[0], bounds[-1], number, endpoint=True)
    return drawn.tolist()


def _words(text: str) -> str:
    return " to ".join(f"{bound:,}" for bound in _bounds(text))


def arrivals(
    num_short: int = 32, short: tuple[int, int] = (500, 2000), num_long: int = 8, size: int = 8192
) -> Load:
    """Long prompts that come while short ones generate: the first after 1.5 s, then 4 a second."""
    times = (0.0,) * num_short + tuple(1.5 + 0.25 * index for index in range(num_long))
    shapes = (short,) * num_short + ((size, 8),) * num_long
    name = f"{num_short} generate, {num_long} prompts of {size:,} arrive"
    warmup = ((short[0], 16),) * num_short + ((size, 8),)
    return Load(name, shapes, Schedule(times_s=times), num_short, warmup)
