"""Controllers of the number of prompt tokens per step, using measured step times.

`LatencyTuner` keeps steps within a time; `KneeTuner` finds how short steps can be without losing
throughput. Both observe every step with context work and return the token budget of the next steps,
a whole number of units: the smallest chunks, which are blocks or groups of them.
"""

from __future__ import annotations

from typing import Literal, Protocol


class ChunkTuner(Protocol):
    """Adapts the token budget of steps with context work."""

    budget: int  # tokens per step

    def observe(self, num_tokens: int, step_s: float) -> int:
        """Learn from a step of num_tokens tokens that took step_s seconds; the new budget."""


def make_tuner(
    max_step_ms: float | Literal["auto"], unit: int, max_num_tokens: int
) -> AwaitedSteps:
    """The controller for a time limit in milliseconds, or for the best throughput ("auto")."""
    if max_step_ms == "auto":
        return AwaitedSteps(KneeTuner(unit, max_num_tokens))
    return AwaitedSteps(LatencyTuner(max_step_ms / 1000, unit, max_num_tokens))


class AwaitedSteps:
    """Passes only measurable steps to a tuner: those that the host waited for.

    On a device, a chunk that is not a prompt's last is only started: its step looks short, and a
    later one that is waited for looks long. So steps that were not waited for are combined with the
    next one that was, each counting as their mean; and each of the first NUM_FIRST steps should be
    waited for.
    """

    NUM_FIRST = 64

    def __init__(self, tuner: ChunkTuner) -> None:
        self._tuner = tuner
        self._num_seen = 0
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0

    @property
    def budget(self) -> int:
        """Tokens per step."""
        return self._tuner.budget

    @property
    def wants_wait(self) -> bool:
        """Whether the next step should be waited for."""
        return self._num_seen < self.NUM_FIRST

    def observe(self, num_tokens: int, step_s: float, *, was_awaited: bool) -> None:
        """Learn from a step with context work."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._seconds += step_s
        if was_awaited:
            count = self._num_steps
            self._num_seen += 1
            self._tuner.observe(round(self._num_tokens / count), self._seconds / count)
            self._num_steps = self._num_tokens = 0
            self._seconds = 0.0


class StepTimeModel:
    """step_s = fixed_s + num_tokens * token_s, and the scatter of steps around that.

    A regression with exponential forgetting. A single outlier has little weight; CHANGE outliers in
    a row on the same side mean that the machine has changed, and the model starts again.
    """

    FORGET = 0.97  # weight of the past, per step: about 30 steps count
    FAR = 4.0  # in spreads, each at least LEAST_SPREAD
    LEAST_SPREAD = 0.005
    CHANGE = 3  # steps in a row

    def __init__(self) -> None:
        self.fixed_s = self.token_s = 0.0
        self._begin()

    def _begin(self) -> None:
        # False: all steps had the same size, and fixed_s is assumed to be 0
        self.knows_slope = False
        self.spread = 0.02  # mean absolute deviation, as a fraction of the time
        self.num_far = 0  # outliers in a row; the sign is their side
        self._count = self._w = self._n = self._s = self._nn = self._ns = 0.0

    def predict(self, num_tokens: int) -> float:
        """Seconds of a step."""
        return self.fixed_s + num_tokens * self.token_s

    def observe(self, num_tokens: int, step_s: float) -> None:
        """Learn from a step."""
        step_s = max(step_s, 1e-9)
        if self._count:
            expected = self.predict(num_tokens)
            off = step_s / expected - 1
            limit = self.FAR * max(self.spread, self.LEAST_SPREAD)
            if abs(off) > limit and self._count > self.CHANGE:
                side = 1 if off > 0 else -1
                self.num_far = self.num_far + side if self.num_far * side > 0 else side
                if abs(self.num_far) >= self.CHANGE:
                    self._begin()
                else:
                    step_s = expected * (1 + limit * side)
            else:
                self.num_far = 0
                if self._count > 2:  # with fewer steps the model is a guess
                    self.spread += 0.1 * (min(abs(off), 0.25) - self.spread)
        self._add(num_tokens, step_s)

    def _add(self, num_tokens: int, step_s: float) -> None:
        # Weighted by 1 / step_s^2, so that deviations are relative to the time.
        forget, weight = self.FORGET, step_s**-2
        self._count = forget * self._count + 1
        self._w = forget * self._w + weight
        self._n = forget * self._n + weight * num_tokens
        self._s = forget * self._s + weight * step_s
        self._nn = forget * self._nn + weight * num_tokens**2
        self._ns = forget * self._ns + weight * num_tokens * step_s
        mean_n, mean_s = self._n / self._w, self._s / self._w
        variance = self._nn / self._w - mean_n**2
        if self._count == 1:
            self.token_s = step_s / num_tokens
        elif variance > (0.05 * mean_n) ** 2:  # else all have the same size: the slope is kept
            self.token_s = (self._ns / self._w - mean_n * mean_s) / variance
            self.knows_slope = True
        # Neither part is negative.
        self.token_s = min(max(self.token_s, 0.0), mean_s / mean_n)
        self.fixed_s = mean_s - mean_n * self.token_s


class LatencyTuner:
    """The largest budget for which steps, except a few outliers, stay within a time.

    Starts with one unit and at most doubles the largest budget seen, so that trying never causes a
    long step.
    """

    MARGIN = 2.0  # distance to the target, in spreads of the step time

    def __init__(self, max_step_s: float, unit: int, max_num_tokens: int) -> None:
        assert max_step_s > 0, "admission.refuse_step_limit comes first"
        self.budget = unit
        self._max_step_s = max_step_s
        self._unit = unit
        self._max_num_tokens = max_num_tokens
        self._model = StepTimeModel()
        self._reach = 0.0  # tokens of the largest recent step

    def observe(self, num_tokens: int, step_s: float) -> int:
        """Learn from a step; the new budget."""
        model = self._model
        model.observe(num_tokens, step_s)
        self._reach = max(num_tokens, 0.99 * self._reach)
        allowed_s = self._max_step_s / (1 + self.MARGIN * model.spread) - model.fixed_s
        unit = self._unit
        wanted = min(2 * self._reach, self._max_num_tokens)
        if model.token_s * wanted > allowed_s:
            fits = allowed_s / model.token_s if model.token_s else 0.0
            if not model.knows_slope and step_s < self._max_step_s:
                fits = max(fits, num_tokens + unit)  # the only way to learn it
            wanted = min(wanted, fits)
        self.budget = max(unit, _floor(int(wanted + 1e-6), unit))
        return self.budget


class KneeTuner:
    """The shortest steps at (nearly) the best throughput: the knee of tokens/s against step time.

    Measures full steps of max_num_tokens tokens, then of half as many, and so on as long as
    tokens/s hold; keeps the smallest size with at least KEEP of the best. After every REVISIT full
    steps it measures the two neighbouring sizes again, so it follows changes of machine or load.
    """

    STEPS = 5  # full steps that measure a size
    KEEP = 0.97
    GIVE_UP = 0.88  # fraction of the best tokens/s: below it, smaller sizes are not tried
    REVISIT = 256

    def __init__(self, unit: int, max_num_tokens: int) -> None:
        sizes = [max_num_tokens]
        while (half := _floor(sizes[-1] // 2, unit)) >= unit:
            sizes.append(half)
        self._sizes = sizes
        self._unit = unit
        self._speeds: dict[int, float] = {}  # tokens/s by size
        self._to_measure = [0]  # indexes into the sizes, next first
        self._seen: list[float] = []
        self._chosen = 0
        self._num_steady = 0
        self.budget = sizes[0]

    def observe(self, num_tokens: int, step_s: float) -> int:
        """Learn from a step, if it was full; the new budget."""
        if self.budget - self._unit < num_tokens <= self.budget:
            if self._to_measure:
                self._measure(num_tokens / max(step_s, 1e-9))
            else:
                self._num_steady += 1
                if self._num_steady >= self.REVISIT:
                    self._revisit()
        return self.budget

    def _measure(self, speed: float) -> None:
        self._seen.append(speed)
        if len(self._seen) < self.STEPS:
            return
        index = self._to_measure.pop(0)
        # other work on the machine can only make steps slower
        self._speeds[index] = max(self._seen)
        self._seen = []
        is_good = self._speeds[index] >= self.GIVE_UP * max(self._speeds.values())
        next_smaller = index + 1
        if is_good and next_smaller < len(self._sizes) and next_smaller not in self._speeds:
            self._to_measure.append(next_smaller)
        if self._to_measure:
            self.budget = self._sizes[self._to_measure[0]]
        else:
            self._choose()

    def _choose(self) -> None:
        least = self.KEEP * max(self._speeds.values())
        self._chosen = max(index for index, speed in self._speeds.items() if speed >= least)
        self.budget = self._sizes[self._chosen]
        self._num_steady = 0

    def _revisit(self) -> None:
        """Measure the size in use and its neighbours again."""
        near = range(max(0, self._chosen - 1), min(len(self._sizes), self._chosen + 2))
        self._to_measure = list(near)
        # Measurements of the other sizes are out of date.
        self._speeds = {}
        self.budget = self._sizes[self._to_measure[0]]


def _floor(num_tokens: int, unit: int) -> int:
    return num_tokens // unit * unit
