"""Drafts where they are likely enough to be worth their cost, for a drafter that knows how likely
they are, in steps controlled by the host.

A plain step gives a token for each of b sequences in plain_s. At `gain` times that speed, a token
is worth plain_s / (gain * b) seconds. So a draft whose chance is p is verified if p is at least its
cost over that worth, and the drafter takes another step behind it if what that will find is worth
step and verification. Costs are measured (`costs`); chances are corrected by how many drafts were
accepted of how many the drafter expected. Chains and trees have costs of their own, and the other
kind is tried now and then. Where drafts are not faster at all, `budget` ends them, and limits what
trying again may cost.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from math import log

from llmctl.runtime.drafting.length.budget import DraftBudget
from llmctl.runtime.drafting.length.confidence import Confidence
from llmctl.runtime.drafting.length.costs import StepCosts
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.request import Sequence

MOST = 8  # drafts of a sequence: fewer are likely enough
TRIAL = 0.5  # credit, in plain steps, from which drafts are tried
LEAST_LEAD = 1.5  # plain steps that drafts may lose from their beginning on, or from their best
FEW_PLAIN = 6  # steps without drafts before the first with them: the first ones vary
REFRESH = 48  # steps with drafts after which a plain one is timed again
FAR = 1.5  # times the expected duration: what is longer has another cause
MEMORY = 0.98  # weight of the past, per step
RECENT = (
    0.95  # the same for how right the drafter is: text that repeats itself begins and ends soon
)
# Steps with drafts of the kind that is used, then of the other; after a trial without a change the
# next one is PATIENCE times as far, at most MAX_EXPLORE steps.
EXPLORE, TRIAL_STEPS = 112, 16
PATIENCE, MAX_EXPLORE = 2, 900
STALE = 8  # steps for which bounds are kept: they change slowly
MARGIN = 1.03  # of gain, for a change to the other kind
PRIOR_TOKEN = 1 / 8  # of a plain step: a draft's verification, before one was timed
LEAST_TOKEN = 1 / 50  # the same, whatever was measured
LEAST_RIGHT = 1 / 100  # of second drafts behind an accepted one, whatever was seen


class _Kind:
    """Chains, or trees: what their steps cost, and what they gave lately."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.gain = 1.0  # tokens over those of plain steps in the same time
        self.was_used = False
        self._spent: dict[tuple[int, int, int], float] = {}  # seconds, by what `spent_s` is asked

    def token_s(self, batch: int, plain_s: float) -> float:
        """Of the verification of one draft more."""
        return max(self.costs.token_s(batch, PRIOR_TOKEN * plain_s), LEAST_TOKEN * plain_s)

    def spent_s(self, batch: int, num_steps: int, num_drafts: int) -> float:
        """What such a step takes; looked up once until `forget`."""
        key = (batch, num_steps, num_drafts)
        known = self._spent.get(key)
        if known is None:
            known = self._spent[key] = self.costs.step_s(batch, num_steps, num_drafts)
        return known

    def is_new(self, batch: int, num_steps: int, num_drafts: int) -> bool:
        """Whether steps with such drafts have not been timed."""
        if not num_drafts or (batch, num_steps, num_drafts) in self._spent:
            return False
        return not self.costs.is_measured(batch, num_steps, num_drafts)

    def forget(self) -> None:
        """Look costs up anew."""
        self._spent.clear()


class ConfidentLengths:
    """See DraftLengths. `most`: drafts of a sequence that there is room for."""

    beside_prompts = True

    def __init__(self, most: int, confidence: Confidence) -> None:
        self.common: int | None = 0
        self._budget = DraftBudget()
        self._confidence = confidence
        self._most = min(most, MOST)
        self._used, self._other = _Kind(), _Kind()
        self._is_chain = True  # those used; a trial has the others
        self._is_on = False
        self._since_plain = self._num_plain = self._num_steps = 0
        self._explore = EXPLORE
        self._bounds_of: tuple[_Kind, int] | None = None  # kind and batch that they were set for
        self._bounds_left = 0  # steps
        # Of recent steps: accepted drafts and expected ones, chains that had a second draft and
        # those of them that had it accepted.
        self._accepted = self._expected = 4.0
        self._second, self._right = 4.0, 2.0

    def of(self, sequence: Sequence) -> int:
        """The same for all: what is likely enough is the drafter's to say."""
        return self.common or 0

    def plan(self, generation: Items[Sequence]) -> None:
        """Decide whether there are drafts, of which kind, and how likely they must be."""
        batch = len(generation)
        plain_s = self._used.costs.plain_s(batch)
        is_known = batch > 0 and self._used.costs.num_plain(batch) >= FEW_PLAIN
        is_on = is_known and self._drafts(plain_s)
        self.common = self._most if is_on else 0
        if is_on:
            assert plain_s is not None
            self._confidence.is_chain = self._is_chain != self._is_trial
            self._set_bounds(batch, plain_s)

    def _drafts(self, plain_s: float | None) -> bool:
        if plain_s is None or self._since_plain >= REFRESH:
            return False
        self._budget.open(plain_s)
        if self._is_on:
            self._is_on = self._budget.lead > -LEAST_LEAD * plain_s
        elif self._budget.credit >= TRIAL * plain_s:
            self._is_on = True
            self._budget.begin()
        return self._is_on

    @property
    def _is_trial(self) -> bool:
        """Whether drafts are of the other kind for a few steps; begins with those used."""
        return self._num_steps >= self._explore and self._confidence.can_branch

    @property
    def _kind(self) -> _Kind:
        """Of the last drafts."""
        is_used = self._confidence.is_chain == self._is_chain
        return self._used if is_used else self._other

    def _set_bounds(self, batch: int, plain_s: float) -> None:
        kind = self._kind
        self._bounds_left -= 1
        if self._bounds_of == (kind, batch) and self._bounds_left > 0:
            return
        self._bounds_of, self._bounds_left = (kind, batch), STALE
        kind.forget()
        token_s = kind.token_s(batch, plain_s)
        per_second = max(1.0, kind.gain) * batch / plain_s
        trust = min(2.0, max(0.25, self._accepted / self._expected))
        kept = per_second * token_s / trust
        step_s = token_s + kind.costs.draft_s(batch) / batch
        continued = per_second * step_s / trust / max(self._right / self._second, LEAST_RIGHT)
        self._confidence.least_kept = log(min(0.9, kept))
        self._confidence.least_continued = log(min(0.95, max(kept, continued)))

    def observe(
        self,
        generated: Items[Commit],
        *,
        num_context_tokens: int,
        step_s: float | None,
        draft_s: float,
        elapsed_s: float,
    ) -> None:
        """Learn from a step; see AdaptiveLengths."""
        if not generated:
            return
        batch, num_steps, num_drafts, accepted = len(generated), self._confidence.num_steps, 0, 0
        for commit in generated:
            num_drafts += commit.num_drafts
            accepted += min(commit.accepted, commit.num_drafts)
        if num_drafts:
            self._learn(generated, accepted)
        if num_context_tokens or step_s is None:
            return
        step_s = elapsed_s  # with what the host does between steps: it delays the next tokens, too
        if num_steps == 0:
            self._num_plain += 1
            if self._num_plain < 2:  # one that follows drafts takes longer
                return
            self._since_plain = 0
            for kind in (self._used, self._other):
                kind.costs.observe(batch, 0, 0, step_s, 0.0)
            self._budget.note_plain(self._used.costs.plain_s(batch) or step_s)
            return
        self._since_plain, self._num_plain = self._since_plain + 1, 0
        kind, plain_s = self._kind, self._used.costs.plain_s(batch)
        is_new = kind.is_new(batch, num_steps, num_drafts)
        if num_drafts:
            kind.costs.observe(batch, num_steps, num_drafts, step_s, draft_s)
        if plain_s is None:
            return
        # What steps like this one take: this one may have taken longer because of others, and in
        # what time a plain step would then have run is not known.
        spent_s = kind.spent_s(batch, num_steps, num_drafts)
        if is_new:
            kind.forget()
            spent_s = min(step_s, FAR * spent_s)
        tokens = 1 + accepted / batch
        self._budget.note_drafts(tokens * plain_s - spent_s, plain_s, is_usual=not is_new)
        self._compare(kind, tokens * plain_s / spent_s)

    def _compare(self, kind: _Kind, gain: float) -> None:
        """Note a step of either kind; after a trial, the better kind is the one to use."""
        if not kind.was_used:
            kind.was_used, kind.gain = True, self._used.gain
        kind.gain += (1 - MEMORY) * (gain - kind.gain)
        self._num_steps += 1
        if self._num_steps < self._explore + TRIAL_STEPS:
            return
        self._num_steps = 0
        self._explore = min(PATIENCE * self._explore, MAX_EXPLORE)
        if self._confidence.can_branch and self._other.gain > MARGIN * self._used.gain:
            self._used, self._other = self._other, self._used
            self._is_chain, self._explore = not self._is_chain, EXPLORE

    def _learn(self, generated: Items[Commit], accepted: int) -> None:
        for commit in generated:
            depth = commit.num_drafts if commit.depth is None else commit.depth
            if depth > 1 and commit.accepted:
                self._second = MEMORY * self._second + 1
                self._right = MEMORY * self._right + (commit.accepted > 1)
        self._accepted = RECENT * self._accepted + accepted
        self._expected = RECENT * self._expected + self._confidence.expected
