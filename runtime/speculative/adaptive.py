"""Draft lengths that follow what is accepted and what it costs, down to none and up again.

Acceptance is measured per sequence, costs per batch size (`costs`), and `lengths` says what is
best. Because both are estimates, two accounts in seconds keep speculation from losing to plain
decoding whatever they say. A step with drafts gains what its tokens would have taken without, less
what it took:

- `credit` earns ALLOWANCE of every plain step and what steps with drafts gain. To start drafting,
  or to try whether it would pay, there must be credit for it. So all that is lost to trying is
  that share, and the first START plain steps' worth.
- `lead` is what drafting has gained since it began, up to LEASH plain steps. Below minus that it
  stops, whatever the estimates say.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.core import Sequence
from llmctl.runtime.speculative.costs import StepCosts
from llmctl.runtime.speculative.lengths import best_length, best_lengths, rate
from llmctl.runtime.verify import Commit

ROUND_LENGTHS = (0, 1, 2, 4, 6, 10, 16, 24, 32)  # those of device rounds: a graph each
ALLOWANCE = 0.01
START, LEASH, MOST_CREDIT = 2.5, 3.0, 10.0  # plain steps
MARGIN = 1.02  # by which a change must promise to be faster
FORGET = 0.9  # weight of the past acceptance, per step
PRIOR = (2.8, 4.0)  # drafts that stood, of drafts judged, before the first: 0.7
SHARED_WEIGHT = 4.0  # judged drafts of all that count for a sequence besides its own
TRY_SEQUENCES, TRY_LENGTH = 4, 2
REFRESH = 256  # steps with drafts after which a plain one is timed again
EXPLORE = 48  # steps between looks at the next shorter and longer length
GROWTH = 4  # times the drafts that a step may have over the most that was timed
HORIZON = 64  # steps in which catching up must promise to pay
FEW_TOKENS = 4  # a drafter that lacks no more of each sequence takes no longer for it
REPLAN = 4  # steps for which a decision stays


class AdaptiveLengths:
    """Decides how much is drafted. `is_common`: all sequences alike, as device rounds need it.

    The loop's thread calls `plan` before and `observe` after each step.
    """

    def __init__(self, most: int, *, has_engine: bool, is_common: bool) -> None:
        self.common: int | None = 0
        self.costs = StepCosts()
        self._most = most
        self._has_engine = has_engine
        self._is_common = is_common
        self._candidates = sorted({n for n in ROUND_LENGTHS if n < most} | {most})
        self._lengths: dict[int, int] = {}  # by sequence id, as planned
        self._shared = PRIOR
        self._own: dict[int, tuple[float, float]] = {}
        self._is_on = False
        self._current = 0  # the common length while on
        self._credit: float | None = None
        self._lead = 0.0
        self._num_steps = 0
        self._since_plain = 0
        self._lag = 0  # tokens that the drafter must catch up with in the planned step
        self._lag_token_s: float | None = None

    def of(self, sequence: Sequence) -> int:
        """Drafts of a planned sequence; none for others."""
        return self._lengths.get(sequence.sequence_id, 0)

    @property
    def acceptance(self) -> float:
        """The share of drafts that stood lately, of those judged."""
        return self._shared[0] / self._shared[1]

    # ---- before a step ----

    def plan(self, generation: Items[Sequence]) -> None:
        """Decide for these sequences; see DraftLengths."""
        lengths = self._decide(generation) if generation else []
        self._lengths = {
            sequence.sequence_id: length
            for sequence, length in zip(generation, lengths, strict=True)
        }
        self.common = lengths[0] if lengths and min(lengths) == max(lengths) else None
        lags = [_lag(s) for s, n in zip(generation, lengths, strict=True) if n and self._has_engine]
        self._lag = sum(lags) if sum(lags) > FEW_TOKENS * len(lags) else 0

    def _decide(self, generation: Items[Sequence]) -> list[int]:
        batch = len(generation)
        plain_s = self.costs.plain_s(batch)
        if plain_s is None or self._since_plain >= REFRESH:
            return [0] * batch
        if self._credit is None:
            self._credit = START * plain_s
        if self._num_steps % REPLAN and len(self._lengths) == batch:
            last = [self._lengths.get(sequence.sequence_id, -1) for sequence in generation]
            stays = self._lead > -LEASH * plain_s if self._is_on else max(last) == 0
            if stays and min(last) >= 0:
                return last
        most_drafts = self.costs.most_drafts(batch)
        if most_drafts == 0:
            return self._try(generation, plain_s)
        most = max(1, GROWTH * most_drafts // batch)
        acceptance = np.array([self._share(sequence) for sequence in generation])
        lengths = self._best(acceptance, min(self._most, most))
        gain = self._promise(acceptance, lengths)
        if self._is_on:
            if gain > 1 and self._lead > -LEASH * plain_s:
                return lengths
            self._is_on, self._current = False, 0
        elif gain > MARGIN and self._credit >= 0:
            promised_s = min(HORIZON * (gain - 1), MOST_CREDIT) * plain_s
            lag = sum(_lag(item) for item, n in zip(generation, lengths, strict=True) if n)
            if self._credit + promised_s >= self._catch_up_s(lag, batch):
                self._is_on, self._lead = True, 0.0
                return lengths
        return self._try(generation, plain_s)

    def _best(self, acceptance: NDArray[np.float64], most: int) -> list[int]:
        """The best lengths that promise anything; zeros where none does."""
        batch = len(acceptance)
        candidates = [n for n in self._candidates if n <= most]
        best, rates = best_length(acceptance, candidates, self.costs)
        if not self._is_common:
            return self._best_of_each(acceptance, candidates, best)
        if self._is_on and best and self._current in rates and best != self._current:
            best = best if rates[best] > MARGIN * rates[self._current] else self._current
        self._current = best
        return [self._explore(best, batch)] * batch

    def _best_of_each(
        self, acceptance: NDArray[np.float64], candidates: list[int], common: int
    ) -> list[int]:
        batch = len(acceptance)
        plain_s, draft_s = self.costs.plain_s(batch) or 0.0, self.costs.draft_s(batch)
        best: NDArray[np.int64] = np.full(batch, common, np.int64)
        best_rate = rate(acceptance, best, self.costs)
        for most in candidates[1:]:  # verification priced as if all drafted that much
            token_s = self.costs.extra_s(batch, most * batch) / (most * batch)
            lengths = best_lengths(acceptance, most, plain_s, draft_s, token_s)
            found = rate(acceptance, lengths, self.costs)
            if found > best_rate:
                best, best_rate = lengths, found
        return [int(length) for length in best]

    def _explore(self, best: int, batch: int) -> int:
        """Now and then a neighbour whose cost has never been measured at this batch size."""
        if self._is_on and best and self._num_steps % EXPLORE < 2:
            index = self._candidates.index(best)
            for near in self._candidates[max(1, index - 1) : index + 2]:
                if not self.costs.is_measured(batch, near, near * batch):
                    return near
        return best

    def _promise(self, acceptance: NDArray[np.float64], lengths: list[int]) -> float:
        """Expected speed over that of plain decoding."""
        none = rate(acceptance, np.zeros(len(lengths), np.int64), self.costs)
        return rate(acceptance, np.array(lengths, np.int64), self.costs) / none

    def _try(self, generation: Items[Sequence], plain_s: float) -> list[int]:
        """A few short drafts if there is credit for them, to learn whether more would pay."""
        batch = len(generation)
        lengths = [0] * batch
        ranked = sorted(range(batch), key=lambda index: _lag(generation[index]))
        length = min(TRY_LENGTH, self._most)
        for count in range(min(TRY_SEQUENCES, batch), 0, -1):
            lag = sum(_lag(generation[index]) for index in ranked[:count])
            cost_s = self.costs.step_s(batch, length, length * count) - plain_s
            cost_s += self._catch_up_s(lag, batch)
            if (self._credit or 0.0) >= max(cost_s, 0.1 * plain_s):
                for index in ranked[:count]:
                    lengths[index] = length
                break
        return lengths

    def _catch_up_s(self, lag: int, batch: int) -> float:
        """What feeding the drafter so many tokens takes; before it was timed, a step for each."""
        if not self._has_engine or not lag:
            return 0.0
        known = self._lag_token_s
        return lag * (self.costs.draft_s(batch) if known is None else known)

    def _share(self, sequence: Sequence) -> float:
        stood, judged = self._own.get(sequence.sequence_id, (0.0, 0.0))
        weight = SHARED_WEIGHT * self.acceptance
        return min(0.999, (stood + weight) / (judged + SHARED_WEIGHT))

    # ---- after a step ----

    def observe(
        self,
        generated: Items[Commit],
        *,
        num_context_tokens: int,
        step_s: float | None,
        draft_s: float,
    ) -> None:
        """Learn from the step that was planned, and from steps of context work alone. step_s None:
        its time is not known."""
        if not generated:
            if self._lag_token_s is None and num_context_tokens:
                self._lag_token_s = draft_s / num_context_tokens
            return
        self._num_steps += 1
        self._judge(generated)
        if num_context_tokens or step_s is None:
            return
        batch = len(generated)
        depth = max(commit.num_drafts for commit in generated)
        num_drafts = sum(commit.num_drafts for commit in generated)
        plain_s = self.costs.plain_s(batch)
        is_new = depth > 0 and not self.costs.is_measured(batch, depth, num_drafts)
        if self._lag and depth:
            if plain_s is not None:
                late_s = step_s - self.costs.step_s(batch, depth, num_drafts)
                known = self._lag_token_s or 0.0
                found = max(0.0, late_s) / self._lag
                self._lag_token_s = (known + found) / 2 if known else found
        else:
            self.costs.observe(batch, depth, num_drafts, step_s, draft_s)
        self._since_plain = self._since_plain + 1 if depth else 0
        if plain_s is None or self._credit is None:
            return
        if depth == 0:
            self._credit += ALLOWANCE * plain_s
        else:
            tokens = sum(min(commit.accepted, commit.num_drafts) + 1 for commit in generated)
            gain = tokens / batch * plain_s - step_s
            self._credit += gain
            if not self._lag and not is_new:  # those are paid once, out of the credit
                self._lead = min(self._lead + gain, LEASH * plain_s)
        self._credit = min(self._credit, MOST_CREDIT * plain_s)

    def _judge(self, generated: Items[Commit]) -> None:
        """Drafts that stood, of those looked at: the ones behind the first that fell were not."""
        drafted = [commit for commit in generated if commit.num_drafts]
        if not drafted:
            return
        stood_all = judged_all = 0.0
        for commit in drafted:
            stood = min(commit.accepted, commit.num_drafts)
            judged = min(stood + 1, commit.num_drafts)
            stood_all, judged_all = stood_all + stood, judged_all + judged
            before = self._own.get(commit.sequence.sequence_id, (0.0, 0.0))
            self._own[commit.sequence.sequence_id] = (
                FORGET * before[0] + stood,
                FORGET * before[1] + judged,
            )
        self._shared = (FORGET * self._shared[0] + stood_all, FORGET * self._shared[1] + judged_all)
        if len(self._own) > 4 * len(generated) + 256:  # mostly sequences that have ended
            kept = {commit.sequence.sequence_id for commit in generated}
            self._own = {key: value for key, value in self._own.items() if key in kept}


def _lag(sequence: Sequence) -> int:
    """Committed tokens that the drafter's cache lacks, beyond the two that every round feeds."""
    return max(0, len(sequence.tokens) - 2 - sequence.draft_kv_len)
