"""The cost of a generation step with and without drafts, learned from measured steps.

    step_s = plain_s(b) + drafting_s(b, depth) + extra_s(b, n)

b sequences propose n drafts in total, the longest of length `depth`. plain_s is a step without
drafts, drafting_s so many steps of the drafter: a line, because what begins a round is often the
larger part (a head's first step reads its weights from memory, the others from a cache). extra_s
is the additional time of the target for n more tokens: measured points, linearly interpolated. All
are kept by batch size, rounded to powers of two.

A drafter with its own cache that is behind must first read the tokens it lacks (`CatchUp`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf, log2

TOKENS_A_STEP = 128  # tokens that a GPU processes in the time of one
# of a plain step, before a draft was timed: a draft model of about an eighth of the parameters
PRIOR_DRAFT = 1 / 20
ONE_DEPTH = 0.25  # variance of depths, or drafts, at which a line weighs as much as its prior
UNDISTURBED = 0.15  # weight of what took longer, where the time without delays is wanted


@dataclass(slots=True)
class _Mean:
    """A moving mean that a single outlier changes little. A first value marked as unreliable is
    replaced by the next one."""

    value: float = 0.0
    count: int = 0

    @property
    def is_known(self) -> bool:
        return self.count > 0 or self.value > 0

    def add(self, value: float, is_trusted: bool = True) -> None:
        if not is_trusted:
            if not self.is_known:
                self.value = value
            return
        self.count += 1
        if self.count > 2 and self.value > 0:  # beside 0 everything is far off
            value = min(max(value, 0.5 * self.value), 2 * self.value)
        self.value += max(1 / self.count, 0.1) * (value - self.value)


@dataclass(slots=True)
class _Line:
    """The drafter's time by its steps, a moving regression: fixed + depth * step, neither negative.
    While all had one depth it is the line through the origin. Outliers and unreliable values as in
    _Mean. above: weight of values above the line; less than 1 makes it that of steps which nothing
    else delayed."""

    above: float = 1.0
    count: int = 0
    depth: float = 0.0  # means
    seconds: float = 0.0
    variance: float = 0.0  # of the depths
    covariance: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.count > 0 or self.seconds > 0

    @property
    def step(self) -> float:
        """Of one more step."""
        from_origin = self.seconds / self.depth
        return min(self.slope(from_origin), from_origin)

    def slope(self, prior: float) -> float:
        """Of the line, if it was thought to be `prior`; not negative."""
        found = (self.covariance + ONE_DEPTH * prior) / (self.variance + ONE_DEPTH)
        return max(found, 0.0)

    def at(self, depth: int) -> float:
        """Of so many steps."""
        return self.seconds + (depth - self.depth) * self.step

    def add(self, depth: int, seconds: float, is_trusted: bool) -> None:
        if not is_trusted:
            if not self.is_known:
                self.depth, self.seconds = depth, seconds
            return
        self.count += 1
        weight = max(1 / self.count, 0.05)
        if self.count > 2:
            expected = self.at(depth)
            weight *= self.above if seconds > expected else 1.0
            least = 0.5 * expected if self.above == 1.0 else 0.0  # nothing makes a step shorter
            seconds = min(max(seconds, least), 2 * expected)
        right, up = depth - self.depth, seconds - self.seconds
        self.depth += weight * right
        self.seconds += weight * up
        self.variance = (1 - weight) * (self.variance + weight * right * right)
        self.covariance = (1 - weight) * (self.covariance + weight * right * up)


@dataclass(slots=True)
class _Bucket:
    """One batch size."""

    plain: _Mean = field(default_factory=_Mean)
    draft: _Line = field(default_factory=_Line)
    verify: _Line = field(default_factory=partial(_Line, UNDISTURBED))  # without drafting, by n
    # By the size of n: its mean and the mean of what it took.
    extra: dict[int, tuple[_Mean, _Mean]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # depths


class StepCosts:
    """The model, by batch size."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def observe(
        self, batch: int, depth: int, num_drafts: int, step_s: float, draft_s: float
    ) -> None:
        """Learn from a step that only generates. The first step of a kind counts only until the
        second one, because graphs are captured and memory is touched in it."""
        size = _bucket(batch)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = _Bucket()
        is_trusted = depth in bucket.seen
        bucket.seen.add(depth)
        if depth == 0:
            if is_trusted:
                bucket.plain.add(step_s)
            return
        bucket.draft.add(depth, draft_s, is_trusted)
        if bucket.plain.count:
            size = _size(num_drafts)
            if size not in bucket.extra:
                bucket.extra[size] = (_Mean(), _Mean())
            count, extra = bucket.extra[size]
            extra_s = max(0.0, step_s - bucket.plain.value - draft_s)
            count.add(num_drafts)
            extra.add(extra_s, is_trusted)
        bucket.verify.add(num_drafts, step_s - draft_s, is_trusted)

    def plain_s(self, batch: int) -> float | None:
        """A step without drafts; None: not measured at this batch size."""
        bucket = self._buckets.get(_bucket(batch))
        return bucket.plain.value if bucket is not None and bucket.plain.count else None

    def num_plain(self, batch: int) -> int:
        """How many steps without drafts were measured at this batch size."""
        bucket = self._buckets.get(_bucket(batch))
        return bucket.plain.count if bucket is not None else 0

    def draft_s(self, batch: int) -> float:
        """One more step of the drafter; of the nearest batch size if this one has not been
        measured."""
        line = self._draft_line(batch)
        return PRIOR_DRAFT * (self.plain_s(batch) or 0.0) if line is None else line.step

    def drafting_s(self, batch: int, depth: int) -> float:
        """So many steps of the drafter."""
        line = self._draft_line(batch) if depth else None
        return depth * self.draft_s(batch) if line is None else line.at(depth)

    def _draft_line(self, batch: int) -> _Line | None:
        bucket = self._buckets.get(_bucket(batch))
        if bucket is not None and bucket.draft.is_known:
            return bucket.draft
        known = [size for size, bucket in self._buckets.items() if bucket.draft.is_known]
        return self._buckets[_nearest(known, batch)].draft if known else None

    def extra_s(self, batch: int, num_drafts: float) -> float:
        """How much longer verification of so many drafts takes than a plain step."""
        if num_drafts <= 0:
            return 0.0
        bucket = self._buckets.get(_bucket(batch))
        if bucket is None or not bucket.extra:
            known = [size for size, bucket in self._buckets.items() if bucket.extra]
            if not known:
                return 0.0
            bucket = self._buckets[_nearest(known, batch)]
        points = sorted((n.value, s.value) for n, s in bucket.extra.values())
        at_most, least = [], inf
        for count, extra in reversed(points):  # fewer drafts cost no more: that was another cause
            least = min(least, extra)
            at_most.append((count, least))
        before = (0.0, 0.0)
        for count, extra in reversed(at_most):
            if num_drafts <= count:
                slope = (extra - before[1]) / max(count - before[0], 1e-9)
                return before[1] + slope * (num_drafts - before[0])
            before = (count, extra)
        return before[1] / before[0] * num_drafts  # beyond the measured range: proportional

    def token_s(self, batch: int, prior: float) -> float:
        """Verification of one more draft, where there are some: what the first one brings with it
        is not part of that, and no plain step is looked at, which may have been long ago. prior:
        what it is thought to be."""
        bucket = self._buckets.get(_bucket(batch))
        return prior if bucket is None else bucket.verify.slope(prior)

    def usual_s(self, batch: int) -> float | None:
        """A step with drafts as they were lately, if nothing else delays it, by the same line as
        `token_s`; None: none was timed."""
        bucket = self._buckets.get(_bucket(batch))
        if bucket is None or not bucket.verify.count:
            return None
        return bucket.verify.seconds + bucket.draft.seconds

    def step_s(self, batch: int, depth: int, num_drafts: float) -> float:
        """A whole step; needs `plain_s`."""
        plain_s, drafting_s = self.plain_s(batch) or 0.0, self.drafting_s(batch, depth)
        return plain_s + drafting_s + self.extra_s(batch, num_drafts)

    def is_measured(self, batch: int, depth: int, num_drafts: int) -> bool:
        """True when steps with drafts like this one have been timed."""
        bucket = self._buckets.get(_bucket(batch))
        if bucket is None:
            return False
        point = bucket.extra.get(_size(num_drafts))
        return depth in bucket.seen and point is not None and point[1].count > 0

    def most_drafts(self, batch: int) -> int:
        """The largest number of drafts verified at this batch size; 0: none yet."""
        bucket = self._buckets.get(_bucket(batch))
        return round(max((n.value for n, _ in bucket.extra.values()), default=0)) if bucket else 0


class CatchUp:
    """The time a drafter takes to read tokens that it lacks: fixed_s + tokens * token_s.

    On a device one step of the drafter reads many tokens, and most of the delay of a catch-up may
    be fixed, so only large ones are used to learn token_s. On a CPU every token takes time.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._token_s: float | None = None
        self._fixed = _Mean()

    def seconds(self, num_tokens: int, draft_s: float) -> float:
        """Expected of so many tokens; draft_s: a step of the drafter."""
        return self._fixed.value + num_tokens * self._each(draft_s) if num_tokens else 0.0

    def observe(self, num_tokens: int, late_s: float, draft_s: float) -> None:
        """A step that read so many tokens took late_s longer than without them."""
        late_s = max(0.0, late_s)
        found, known = late_s / num_tokens, self._each(draft_s)
        if self._on_device:
            if num_tokens * known > max(4 * draft_s, self._fixed.value):
                self._token_s = min(max(known / 2, found), 2 * known)
            self._fixed.add(max(0.0, late_s - num_tokens * self._each(draft_s)))
        else:
            self._token_s = found if self._token_s is None else (known + found) / 2

    def _each(self, draft_s: float) -> float:
        if self._token_s is not None:
            return self._token_s
        return draft_s / (TOKENS_A_STEP if self._on_device else 1)


def _bucket(batch: int) -> int:
    return max(0, batch - 1).bit_length()


def _nearest(known: list[int], batch: int) -> int:
    wanted = _bucket(batch)
    return min(known, key=lambda size: (abs(size - wanted), size))


def _size(num_drafts: int) -> int:
    return round(2 * log2(max(1, num_drafts)))
