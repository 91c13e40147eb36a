"""Token counts drawn from a distribution. Pure functions of a seeded generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmctl.errors import BadConfig

_MOST = 2**31 - 1  # tokens, as engines count them


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """max(1, ceil(x)) with x drawn from a normal distribution, as prepare_dataset.py has it."""

    mean: float
    stdev: float

    def __post_init__(self) -> None:
        if not 0 < self.mean <= _MOST:  # nor NaN
            raise BadConfig(f"the mean length is {self.mean}; it must be above 0, at most {_MOST}")
        if not 0 <= self.stdev <= _MOST:
            raise BadConfig(f"the standard deviation is {self.stdev}; it must be from 0 to {_MOST}")

    def draw(self, generator: np.random.Generator) -> int:
        """One length."""
        return max(1, math.ceil(generator.normal(self.mean, self.stdev)))

    @classmethod
    def parse(cls, option: str, text: str) -> NormalLengths:
        """From "mean,stdev". Raises BadConfig."""
        try:
            mean, stdev = map(float, text.split(","))
        except ValueError:
            raise BadConfig(f"{option} is {text!r}; it must have the form mean,stdev") from None
        return cls(mean, stdev)


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Every integer from `least` to `most` with equal probability."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise BadConfig(
                f"lengths from {self.least} to {self.most} are requested; the smaller one must be "
                "at least 1 and come first"
            )
        if self.most > _MOST:
            raise BadConfig(f"lengths up to {self.most} are requested; {_MOST} is the maximum")

    def draw(self, generator: np.random.Generator) -> int:
        """One length."""
        return int(generator.integers(self.least, self.most + 1))


Lengths = NormalLengths | UniformLengths
