"""Draft lengths that follow acceptance and cost, down to no drafts and up again.

Acceptance is measured per sequence (`acceptance`), costs per batch size (`costs`); `lengths`
computes the best lengths, and `budget` limits what may be risked for them.

In steps controlled by the host, each sequence has its own length, and a few short drafts show what
longer ones would cost. Device rounds have one draft length for all sequences, so there a trial is a
few rounds of one draft each. A trial is made at the start, and whenever there is credit for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.length.acceptance import Acceptance
from llmctl.runtime.drafting.length.budget import LEAD_LIMIT, DraftBudget
from llmctl.runtime.drafting.length.costs import CatchUp, StepCosts
from llmctl.runtime.drafting.length.lengths import (
    LoneLengths,
    best_length,
    best_lengths,
    rate,
    round_lengths,
)
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.request import Sequence

MARGIN = 1.02  # expected speed-up needed for a change
TRY_SEQUENCES, TRY_LENGTH = 4, 2  # in steps controlled by the host
TRIAL_ROUNDS, TRIAL_LENGTH = 3, 1  # plus the round that was planned in the meantime
REFRESH = 256  # steps with drafts after which a plain one is timed again
EXPLORE = 48  # steps between looks at the next shorter and longer length
GROWTH = 4  # a step may have this many times the most drafts that were timed
HORIZON = 64  # steps within which catching up must be repaid, or fewer if all sequences end before
# a host-controlled drafter that lacks at most this many tokens of each needs no extra time
FEW_TOKENS = 4
REPLAN = 4  # steps for which a decision is kept
FAR = 3.0  # times the expected duration: longer steps have another cause (a graph capture)


class AdaptiveLengths:
    """Decides how much is drafted. `is_common`: one length for all sequences, as device rounds need
    it.

    The loop's thread calls `plan` before and `observe` after each step; for rounds that run ahead,
    `plan` is called before the previous step was observed.
    """

    def __init__(self, most: int, *, has_cache: bool, is_common: bool) -> None:
        self.common: int | None = 0
        # the host controls such steps, so the costs of rounds do not apply
        self.beside_prompts = not is_common
        self.costs = StepCosts()
        self._acceptance = Acceptance()
        self._budget = DraftBudget()
        self._catch_up = CatchUp(on_device=is_common)
        self._most = most
        self._has_cache = has_cache
        self._is_common = is_common
        self._alone = LoneLengths(self.costs)
        self._candidates = round_lengths(most)
        self._lengths: dict[int, int] = {}  # by sequence id, as planned
        self._is_on = self._has_begun = False  # has_begun: no step with drafts since
        self._current = 0  # the common length while on
        self._trial_rounds = 0  # rounds left of a trial
        self._num_steps = 0
        self._since_plain = 0
        self._lag = 0  # tokens that the drafter has to read before the next step with drafts

    def of(self, sequence: Sequence) -> int:
        """Drafts of a planned sequence; none for others."""
        return self._lengths.get(sequence.sequence_id, 0)

    @property
    def acceptance(self) -> float:
        """The fraction of recently judged drafts that was accepted."""
        return self._acceptance.shared

    # ---- before a step ----

    def plan(self, generation: Items[Sequence]) -> None:
        """Decide for these sequences; see DraftLengths."""
        lengths = self._decide(generation) if generation else []
        self._lengths = {
            sequence.sequence_id: length
            for sequence, length in zip(generation, lengths, strict=True)
        }
        self.common = lengths[0] if lengths and min(lengths) == max(lengths) else None
        self._lag = max(self._lag, self._behind(generation, lengths))

    def _decide(self, generation: Items[Sequence]) -> list[int]:
        batch = len(generation)
        plain_s = self.costs.plain_s(batch)
        if plain_s is None or self._since_plain >= REFRESH:
            self._trial_rounds = 0
            return [0] * batch
        self._budget.open(plain_s)
        if self._trial_rounds:
            return [TRIAL_LENGTH] * batch
        if self._num_steps % REPLAN and len(self._lengths) == batch:
            last = [self._lengths.get(sequence.sequence_id, -1) for sequence in generation]
            stays = self._budget.lead > -LEAD_LIMIT * plain_s if self._is_on else max(last) == 0
            if stays and min(last) >= 0:
                return last
        most_drafts = self.costs.most_drafts(batch)
        if most_drafts == 0:
            return self._try(generation, plain_s)
        most = max(1, GROWTH * most_drafts // batch)
        most = min(self._most, most)
        acceptance = np.array([self._acceptance.of(sequence) for sequence in generation])
        if batch == 1 and not self._is_common:
            length, gain = self._alone.best(float(acceptance[0]), most)
            lengths = [length]
        else:
            lengths = self._best(acceptance, most)
            gain = self._promise(acceptance, lengths)
        if self._is_on:
            if self._budget.lead > (0.0 if gain < 1 else -LEAD_LIMIT * plain_s):
                return [max(1, length) for length in lengths] if self._is_common else lengths
            self._is_on, self._current = False, 0
        elif gain > MARGIN and self._budget.credit >= -plain_s:
            cost_s = self._catch_up_s(self._behind(generation, lengths), batch)
            steps = min(HORIZON, _most_left(generation))
            if self._budget.promised(gain, steps, plain_s) >= cost_s:
                self._is_on = self._has_begun = True
                self._budget.begin()
                return lengths
        return self._try(generation, plain_s)

    def _best(self, acceptance: NDArray[np.float64], most: int) -> list[int]:
        """The best lengths if any is expected to be faster; zeros otherwise."""
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
        for most in candidates[1:]:  # verification is costed as if all sequences drafted that much
            token_s = self.costs.extra_s(batch, most * batch) / (most * batch)
            lengths = best_lengths(acceptance, most, plain_s, draft_s, token_s)
            found = rate(acceptance, lengths, self.costs)
            if found > best_rate:
                best, best_rate = lengths, found
        return [int(length) for length in best]

    def _explore(self, best: int, batch: int) -> int:
        """Occasionally a neighbouring length whose cost has not been measured at this batch
        size."""
        if self._is_on and best and self._num_steps % EXPLORE < 2:
            index = self._candidates.index(best)
            for near in self._candidates[max(1, index - 1) : index + 2]:
                if not self.costs.is_measured(batch, near, near * batch):
                    return near
        return best

    def _promise(self, acceptance: NDArray[np.float64], lengths: list[int]) -> float:
        """Expected speed relative to plain decoding."""
        none = rate(acceptance, np.zeros(len(lengths), np.int64), self.costs)
        return rate(acceptance, np.array(lengths, np.int64), self.costs) / none

    def _try(self, generation: Items[Sequence], plain_s: float) -> list[int]:
        """Trial drafts, if there is credit for them, to learn whether more would be faster."""
        if self._is_common:
            return self._try_rounds(generation, plain_s)
        batch = len(generation)
        lengths = [0] * batch
        ranked = sorted(range(batch), key=lambda index: _lag(generation[index]))
        length = min(TRY_LENGTH, self._most)
        for count in range(min(TRY_SEQUENCES, batch), 0, -1):
            lag = sum(_lag(generation[index]) for index in ranked[:count])
            cost_s = self.costs.step_s(batch, length, length * count) - plain_s
            cost_s += self._catch_up_s(lag, batch)
            if self._budget.credit >= max(cost_s, 0.1 * plain_s):
                for index in ranked[:count]:
                    lengths[index] = length
                break
        return lengths

    def _try_rounds(self, generation: Items[Sequence], plain_s: float) -> list[int]:
        batch = len(generation)
        lengths = [TRIAL_LENGTH] * batch
        round_s = self.costs.step_s(batch, TRIAL_LENGTH, sum(lengths)) - plain_s
        cost_s = TRIAL_ROUNDS * round_s
        cost_s += self._catch_up_s(self._behind(generation, lengths), batch)
        is_late = _most_left(generation) < HORIZON / 2
        if is_late or self._budget.credit < max(cost_s, 0.1 * plain_s):
            return [0] * batch
        self._trial_rounds = TRIAL_ROUNDS
        return lengths

    def _behind(self, generation: Items[Sequence], lengths: list[int]) -> int:
        """Tokens that the drafter must read before it can draft with these lengths."""
        if not self._has_cache:
            return 0
        lags = [_lag(s) for s, length in zip(generation, lengths, strict=True) if length]
        few = 0 if self._is_common else FEW_TOKENS * len(lags)
        return sum(lags) if sum(lags) > few else 0

    def _catch_up_s(self, lag: int, batch: int) -> float:
        return self._catch_up.seconds(lag, self.costs.draft_s(batch)) if self._has_cache else 0.0

    # ---- after a step ----

    def observe(
        self,
        generated: Items[Commit],
        *,
        num_context_tokens: int,
        step_s: float | None,
        draft_s: float,
        elapsed_s: float,
    ) -> None:
        """Learn from a step, including steps of context work alone. elapsed_s: time since the end
        of the previous step; step_s: the duration of such a step in an uninterrupted sequence of
        steps, None if it could not be measured."""
        if not generated:
            if num_context_tokens and not self._is_common:  # steps on a device are not waited for
                self._catch_up.observe(num_context_tokens, draft_s, draft_s / num_context_tokens)
            return
        self._num_steps += 1
        self._acceptance.observe(generated)
        if num_context_tokens:
            return
        batch = len(generated)
        depth = max(commit.num_rows for commit in generated)
        num_drafts = sum(commit.num_rows for commit in generated)
        self._since_plain = self._since_plain + 1 if depth else 0
        plain_s = self.costs.plain_s(batch)
        is_new = depth > 0 and not self.costs.is_measured(batch, depth, num_drafts)
        expected_s = self.costs.step_s(batch, depth, num_drafts)
        lag = 0
        if depth:
            lag, self._lag = self._lag, 0
            self._trial_rounds = max(0, self._trial_rounds - 1)
        if lag and plain_s is not None:
            self._catch_up.observe(lag, elapsed_s - expected_s, self.costs.draft_s(batch))
        elif not lag and step_s is not None:
            self.costs.observe(batch, depth, num_drafts, step_s, draft_s)
        if plain_s is None:
            return
        if depth == 0:
            self._budget.note_plain(plain_s)
            return
        tokens = sum(min(commit.accepted, commit.num_drafts) + 1 for commit in generated)
        spent_s = elapsed_s if step_s is None else step_s
        if not lag:
            spent_s = min(spent_s, FAR * expected_s)
        gain_s = tokens / batch * plain_s - spent_s
        is_first, self._has_begun = self._has_begun, False
        self._budget.note_drafts(gain_s, plain_s, is_usual=not is_first and not is_new)


def _lag(sequence: Sequence) -> int:
    """Committed tokens that the drafter's cache lacks, beyond the two that every round feeds."""
    lens = sequence.kv_lens
    num_read = lens[DRAFT_GROUP] if len(lens) > DRAFT_GROUP else 0  # without a cache: nothing
    return max(0, len(sequence.tokens) - 2 - num_read)


def _most_left(generation: Items[Sequence]) -> int:
    """The most steps without drafts until the last of these sequences ends."""
    return max(sequence.max_len - len(sequence.tokens) for sequence in generation)
