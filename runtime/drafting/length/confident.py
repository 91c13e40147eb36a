"""Drafts where they are likely enough to be worth their cost, for a drafter that knows how likely
they are, in steps controlled by the host.

A step with drafts gives each of b sequences t tokens in s seconds, so a token is worth s / (b * t),
or what plain steps take for it if that is less. A draft whose chance is p is verified if p is at
least its cost over that worth, and the drafter takes another step behind it if what that will find
is worth step and verification. Costs are measured (`costs`); chances are corrected by how many
drafts were accepted of how many the drafter expected. Chains and trees have costs of their own, and
trees are tried now and then; each says what its first path alone, a chain, would have brought, so
that a few steps compare the two. Where drafts are not faster at all, `budget` ends them, and limits
what trying again may cost.

Steps with drafts are taken in blocks. What their bounds are is decided before one and what they
gave is learned behind it: on a CPU the same for every step was 3 % of a small model's steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import log

from llmctl.runtime.drafting.length.budget import DraftBudget
from llmctl.runtime.drafting.length.confidence import Confidence
from llmctl.runtime.drafting.length.costs import StepCosts
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.request import Sequence

MOST = 8  # drafts of a sequence: fewer are likely enough
LEAST_CREDIT = 0.5  # in plain steps, from which drafts are tried
LEAST_LEAD = 1.5  # plain steps that drafts may lose from their beginning on, or from their best
FEW_PLAIN = 6  # steps without drafts before the first with them: the first ones vary
REFRESH = 160  # steps with drafts after which a plain one is timed again
FAR = 1.5  # times the expected duration: what is longer has another cause
MEMORY = 0.98  # weight of the past, per step
RECENT = (
    0.95  # the same for how right the drafter is: text that repeats itself begins and ends soon
)
BLOCK = 8  # steps with drafts between decisions
TIMED = 2  # of these, the last ones, whose time is learned from; and those of a new kind
# Blocks of chains, then of trees on trial. After a trial in vain the next one is PATIENCE times as
# far, at most MAX_EXPLORE blocks.
EXPLORE, TRIAL = 24, 2
PATIENCE, MAX_EXPLORE = 2, 256
FADES = 0.5  # weight of earlier trials
MARGIN = 1.03  # of gain, for a change between chains and trees
PRIOR_TOKEN = 1 / 8  # of a plain step: a draft's verification, before one was timed
LEAST_TOKEN = 1 / 50  # the same, whatever was measured
LEAST_RIGHT = 1 / 100  # of second drafts behind an accepted one, whatever was seen

_Step = tuple[int, int, int]  # sequences, steps of the drafter, drafts of all


class _Kind:
    """Chains, or trees: what their steps cost."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._spent: dict[_Step, float] = {}  # seconds, by what `spent_s` is asked

    def token_s(self, batch: int, plain_s: float) -> float:
        """Of the verification of one draft more."""
        return max(self.costs.token_s(batch, PRIOR_TOKEN * plain_s), LEAST_TOKEN * plain_s)

    def spent_s(self, step: _Step) -> float:
        """What such a step takes; looked up once until `forget`."""
        known = self._spent.get(step)
        if known is None:
            known = self._spent[step] = self.costs.step_s(*step)
        return known

    def is_new(self, step: _Step) -> bool:
        """Whether steps with such drafts have not been timed."""
        return step[2] > 0 and step not in self._spent and not self.costs.is_measured(*step)

    def forget(self) -> None:
        """Look costs up anew."""
        self._spent.clear()


@dataclass(slots=True)
class _Sums:
    """Tokens of a sequence, and seconds in which they came."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Of a step."""
        self.tokens += tokens
        self.seconds += seconds

    def fade(self) -> None:
        """Count for less than what comes."""
        self.tokens *= FADES
        self.seconds *= FADES

    @property
    def speed(self) -> float:
        """Tokens a second; 0 without steps."""
        return self.tokens / self.seconds if self.seconds else 0.0


class ConfidentLengths:
    """See DraftLengths. `most`: drafts of a sequence that there is room for."""

    beside_prompts = True

    def __init__(self, most: int, confidence: Confidence) -> None:
        self.common: int | None = 0
        self._budget = DraftBudget()
        self._confidence = confidence
        self._most = min(most, MOST)
        self._chains, self._trees = _Kind(), _Kind()
        self._uses_trees = False
        self._tokens = 1.0  # of a sequence in a step with drafts
        self._is_on = False
        self._since_plain = self._num_plain = self._num_blocks = 0
        self._explore = EXPLORE
        self._batch = 0  # of the block
        self._left = 0  # steps of the block that are to come
        self._num_steps = 0  # steps of the block that were timed, and what they brought
        self._brought = _Sums()
        # Of the steps with trees: what they brought, and what a chain would have.
        self._as_tree, self._as_chain = _Sums(), _Sums()
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
        if self._left and batch == self._batch:
            self._left -= 1
            return
        self._end_block()
        plain_s = self._chains.costs.plain_s(batch)
        is_known = batch > 0 and self._chains.costs.num_plain(batch) >= FEW_PLAIN
        is_on = is_known and self._drafts(plain_s)
        self.common = self._most if is_on else 0
        if is_on:
            assert plain_s is not None
            self._batch, self._left = batch, BLOCK - 1
            self._confidence.is_chain = not (self._uses_trees or self._is_trial)
            self._set_bounds(batch, plain_s)

    def _drafts(self, plain_s: float | None) -> bool:
        if plain_s is None or self._since_plain >= REFRESH:
            return False
        self._budget.open(plain_s)
        if self._is_on:
            self._is_on = self._budget.lead > -LEAST_LEAD * plain_s
        elif self._budget.credit >= LEAST_CREDIT * plain_s:
            self._is_on = True
            self._budget.begin()
        return self._is_on

    @property
    def _is_trial(self) -> bool:
        """Whether chains are used, and trees for a few blocks."""
        return self._confidence.can_branch and self._num_blocks >= self._explore

    @property
    def _kind(self) -> _Kind:
        """Of the last drafts."""
        return self._chains if self._confidence.is_chain else self._trees

    def _set_bounds(self, batch: int, plain_s: float) -> None:
        kind = self._kind
        kind.forget()
        token_s = kind.token_s(batch, plain_s)
        usual_s = kind.costs.usual_s(batch)
        speed = 0.0 if usual_s is None else self._tokens / usual_s
        per_second = batch * max(speed, 1 / plain_s)
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
        # The time to the next step, with what the host does between them: it delays tokens, too.
        if num_steps == 0:
            self._note_plain(batch, elapsed_s)
            return
        self._since_plain, self._num_plain = self._since_plain + 1, 0
        kind, step = self._kind, (batch, num_steps, num_drafts)
        tokens = 1 + accepted / batch
        if kind.is_new(step):
            kind.costs.observe(*step, elapsed_s, draft_s)
            self._note_new(step, tokens, elapsed_s)
            return
        if num_drafts and self._left < TIMED:
            kind.costs.observe(*step, elapsed_s, draft_s)
        # What steps like this one take: this one may have taken longer because of others, and in
        # what time a plain step would then have run is not known. Or the few before it had.
        spent_s = min(kind.spent_s(step), FAR * elapsed_s)
        self._num_steps += 1
        self._brought.add(tokens, spent_s)
        if not self._confidence.is_chain:
            self._compare(generated, batch, tokens, spent_s)

    def _note_plain(self, batch: int, step_s: float) -> None:
        self._num_plain += 1
        if self._num_plain < 2:  # one that follows drafts takes longer
            return
        self._since_plain = 0
        for kind in (self._chains, self._trees):
            kind.costs.observe(batch, 0, 0, step_s, 0.0)
        self._budget.note_plain(self._chains.costs.plain_s(batch) or step_s)

    def _note_new(self, step: _Step, tokens: float, step_s: float) -> None:
        """The first step of its kind, which may have taken longer than others will."""
        plain_s = self._chains.costs.plain_s(step[0])
        if plain_s is not None:
            spent_s = min(step_s, FAR * self._kind.spent_s(step))
            self._kind.forget()
            self._budget.note_drafts(tokens * plain_s - spent_s, plain_s, is_usual=False)

    def _end_block(self) -> None:
        """Account for its steps."""
        count, brought = self._num_steps, self._brought
        self._left = self._num_steps = 0
        plain_s = self._chains.costs.plain_s(self._batch)
        if not count or plain_s is None:
            return
        self._brought = _Sums()
        plainly_s = brought.tokens * plain_s
        self._budget.note_drafts(plainly_s - brought.seconds, plain_s, is_usual=True)
        self._tokens += (1 - MEMORY**count) * (brought.tokens / count - self._tokens)
        self._num_blocks += 1
        if self._num_blocks >= self._explore + TRIAL:
            self._choose_kind()

    def _compare(self, generated: Items[Commit], batch: int, tokens: float, spent_s: float) -> None:
        """Note what a tree has brought, and what its first path would have, in no more time: of the
        accepted drafts those that the tree has there, which alone need not be moved."""
        beside = sum(len(commit.moves) for commit in generated)
        alone = (batch, self._confidence.num_steps, self._confidence.num_first)
        self._as_tree.add(tokens, spent_s)
        self._as_chain.add(tokens - beside / batch, min(spent_s, self._chains.spent_s(alone)))

    def _choose_kind(self) -> None:
        """After a trial, or as many steps with trees."""
        tree, chain = self._as_tree.speed, self._as_chain.speed
        self._as_tree.fade()
        self._as_chain.fade()
        self._num_blocks = 0
        if self._uses_trees:
            self._uses_trees = chain <= MARGIN * tree
            self._explore = EXPLORE
        elif self._confidence.can_branch and tree > MARGIN * chain:
            self._uses_trees, self._explore = True, EXPLORE
        elif tree < chain:
            self._explore = min(PATIENCE * self._explore, MAX_EXPLORE)

    def _learn(self, generated: Items[Commit], accepted: int) -> None:
        for commit in generated:
            depth = commit.num_drafts if commit.depth is None else commit.depth
            if depth > 1 and commit.accepted:
                self._second = MEMORY * self._second + 1
                self._right = MEMORY * self._right + (commit.accepted > 1)
        self._accepted = RECENT * self._accepted + accepted
        self._expected = RECENT * self._expected + self._confidence.expected
