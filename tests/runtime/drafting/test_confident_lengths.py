"""Drafts by their chances, in simulations of machines and heads that the controller has to find
out: never much slower than plain decoding, and nearly as fast as the best limits there are."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from types import SimpleNamespace

import numpy as np
import pytest

from llmctl.runtime.drafting.length.confidence import Confidence
from llmctl.runtime.drafting.length.confident import BLOCK, MAX_EXPLORE, MOST, ConfidentLengths
from llmctl.runtime.drafting.length.lengths import FixedLengths


@dataclass(frozen=True)
class Machine:
    """Milliseconds. tree: more for a step with a tree, whose second branch finds `branch` of what
    the first misses."""

    plain: float = 0.75
    token: float = 0.11
    step: float = 0.05
    start: float = 0.03
    tree: float = 0.08
    branch: float = 0.0

    def seconds(self, batch: int, num_drafts: int, num_steps: int, is_tree: bool) -> tuple:
        drafting = self.start * (num_steps > 0) + self.step * num_steps
        verifying = self.plain + self.token * (batch - 1 + num_drafts)
        return (verifying + drafting + self.tree * is_tree) / 1e3, drafting / 1e3


class Run:
    """Sequences that generate for ever. mean: how often a draft is right, and `claims` times that
    is what the head thinks of it."""

    def __init__(self, machine, mean, *, batch=1, claims=1.0, noise=0.03, stalls=0.0, seed=0):
        self.machine, self.mean, self.claims, self.noise = machine, mean, claims, noise
        self.stalls, self.chance = stalls, np.random.default_rng(seed)
        self.confidence = Confidence(can_branch=machine.branch > 0)
        self.sequences = [SimpleNamespace(sequence_id=n) for n in range(batch)]
        self.seconds = self.tokens = 0.0
        self.drafts: list[int] = []
        self.kinds: list[bool] = []

    def draft(self) -> tuple[list[float], int, int]:
        """(chances of the chain, accepted drafts, steps) of a sequence."""
        limits, path, chances, accepted, is_right = self.confidence, 0.0, [], 0, True
        for steps in range(1, MOST + 1):
            chance = self.chance.beta(self.mean, 1 - self.mean)
            path += log(max(1e-9, min(0.999, chance * self.claims)))
            is_right = is_right and self.chance.random() < chance
            if path < limits.least_kept:
                return chances, accepted, steps
            chances.append(path)
            accepted += is_right
            if path < limits.least_continued:
                break
        return chances, accepted, steps

    def step(self, lengths) -> None:
        lengths.plan(self.sequences)
        batch, commits, found, steps, num_first = len(self.sequences), [], [], 0, 0
        is_tree = self.machine.branch > 0 and not self.confidence.is_chain
        for sequence in self.sequences:
            chances, accepted, own, moves = [], 0, 0, ()
            if lengths.of(sequence):
                chances, accepted, own = self.draft()
                num_first += len(chances)
                if is_tree and chances and not accepted:
                    accepted = int(self.chance.random() < self.machine.branch)
                    moves = ((1, 0),) * accepted
                chances = [*chances, *chances[:1]] if is_tree else chances
            found.append(chances)
            steps = max(steps, own)
            counts = {"num_drafts": len(chances), "accepted": accepted}
            commits.append(SimpleNamespace(**counts, moves=moves, depth=None))
        self.confidence.note(steps, found, num_first)
        drafts = sum(map(len, found))
        true_s, draft_s = self.machine.seconds(batch, drafts, steps, is_tree and drafts > 0)
        self.seconds += true_s
        self.tokens += batch + sum(commit.accepted for commit in commits)
        self.drafts.append(drafts)
        self.kinds.append(is_tree)
        seen = 1 + self.chance.uniform(-self.noise, self.noise)
        seen *= 20.0 if self.chance.random() < self.stalls else 1.0
        if isinstance(lengths, ConfidentLengths):
            times = {"step_s": seen * true_s, "draft_s": draft_s, "elapsed_s": seen * true_s}
            lengths.observe(commits, num_context_tokens=0, **times)

    def speed(self, lengths, steps=3000) -> float:
        """Over that of plain decoding."""
        for _ in range(steps):
            self.step(lengths)
        batch = len(self.sequences)
        plain_s, _ = self.machine.seconds(batch, 0, 0, False)
        return self.tokens / self.seconds * plain_s / batch


def adaptive(run: Run) -> float:
    return run.speed(ConfidentLengths(25, run.confidence))


def best_of_limits(make) -> float:
    """With the same head, the best of many fixed limits."""
    found = []
    for kept in (0.1, 0.2, 0.3, 0.45, 0.6):
        for times in (1.0, 1.5, 2.5):
            run = make()
            run.confidence.least_kept = log(kept)
            run.confidence.least_continued = log(min(0.95, kept * times))
            found.append(run.speed(FixedLengths(MOST), 1500))
    return max(found)


@pytest.mark.parametrize("claims", [1.0, 2.5])
@pytest.mark.parametrize("mean", [0.02, 0.1])
@pytest.mark.parametrize("batch", [1, 4])
def test_drafts_that_do_not_pay_cost_little(mean, claims, batch):
    """Whatever the head thinks of itself."""
    run = Run(Machine(), mean, batch=batch, claims=claims)
    assert adaptive(run) > 0.97
    assert run.drafts.count(0) > 2500


@pytest.mark.parametrize(
    "machine",
    [Machine(), Machine(token=0.02, step=0.1), Machine(plain=9.0), Machine(step=0.02, start=0.12)],
)
@pytest.mark.parametrize(("mean", "claims"), [(0.45, 1.0), (0.6, 1.0), (0.75, 0.8), (0.6, 1.3)])
def test_drafts_that_pay_are_nearly_as_fast_as_with_the_best_limits(machine, mean, claims):
    best = best_of_limits(lambda: Run(machine, mean, claims=claims))
    found = adaptive(Run(machine, mean, claims=claims))
    assert found > 0.93 * best and found > 1.05


def test_text_that_repeats_itself_now_and_then_is_drafted_where_it_does():
    """A head that is seldom right for 150 steps, and then often: losses are outlived."""
    machine = Machine(plain=0.65, token=0.065, step=0.022, start=0.1)
    found = []
    for seed in range(4):
        run = Run(machine, 0.2, noise=0.1, stalls=0.01, seed=seed)
        lengths = ConfidentLengths(25, run.confidence)
        for passage in range(20):
            run.mean = 0.8 if passage % 2 else 0.2
            speed = run.speed(lengths, 150)
        found.append(speed)
    assert np.mean(found) > 1.65 and min(found) > 1.5


def test_another_kind_that_is_no_faster_is_tried_less_and_less():
    run = Run(Machine(branch=0.01), 0.6)
    lengths = ConfidentLengths(25, run.confidence)
    run.speed(lengths, 8000)
    starts = [at for at in range(1, 8000) if run.kinds[at] and not run.kinds[at - 1]]
    gaps = np.diff(starts)
    assert len(gaps) > 3 and (gaps[1:3] > 1.5 * gaps[:2]).all()
    assert max(gaps) < 1.2 * MAX_EXPLORE * BLOCK, "but never given up"


def test_stalls_of_the_machine_change_little():
    """One step in twenty takes twenty times as long."""
    for seed in range(8):
        assert adaptive(Run(Machine(), 0.65, stalls=0.05, noise=0.1, seed=seed)) > 1.2
    assert adaptive(Run(Machine(), 0.05, stalls=0.05, noise=0.1)) > 0.92


def test_a_kind_of_step_that_was_delayed_when_it_was_first_timed_does_not_end_drafts():
    """Whatever its cost is then thought to be: those that follow are known to be shorter."""
    run = Run(Machine(), 0.65)
    lengths = ConfidentLengths(25, run.confidence)
    while not lengths.common:
        run.step(lengths)
    for _ in range(2):  # the first is not trusted
        lengths._chains.costs.observe(1, 2, 2, 0.02, 0.0001)
    run.speed(lengths, 300)
    assert run.drafts[-250:].count(0) < 100 and np.mean(run.drafts[-250:]) > 0.8


def test_many_sequences_have_fewer_drafts_each():
    alone, together = Run(Machine(), 0.6), Run(Machine(token=0.3), 0.6, batch=8)
    assert adaptive(alone) > 1.2 and adaptive(together) > 0.97
    assert np.mean(together.drafts) / 8 < 0.5 * np.mean(alone.drafts)


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [(Machine(branch=0.01), False), (Machine(plain=3.0, tree=0.02, branch=0.95), True)],
)
def test_trees_are_used_where_they_are_faster(machine, wanted):
    run = Run(machine, 0.5)
    adaptive(run)
    trees = np.mean(run.kinds[1500:])
    assert trees > 0.7 if wanted else trees < 0.3, "the other kind is tried now and then"


def test_a_head_that_becomes_useless_is_left_and_tried_again():
    run = Run(Machine(), 0.7)
    lengths = ConfidentLengths(25, run.confidence)
    assert run.speed(lengths, 500) > 1.2
    run.mean = 0.02
    for _ in range(500):
        run.step(lengths)
    assert run.drafts[-200:].count(0) > 180, "soon"
    run.mean = 0.7
    for _ in range(2500):
        run.step(lengths)
    assert run.drafts[-300:].count(0) < 100, "and on again"


def test_limits_are_chances():
    run = Run(Machine(), 0.6)
    lengths = ConfidentLengths(25, run.confidence)
    for _ in range(300):
        run.step(lengths)
        kept, continued = run.confidence.least_kept, run.confidence.least_continued
        assert exp(kept) <= 0.9 and kept <= continued <= 0
    assert lengths.of(run.sequences[0]) in (0, MOST)


def test_a_step_that_generates_nothing_is_planned_too():
    run = Run(Machine(), 0.6)
    lengths = ConfidentLengths(25, run.confidence)
    for _ in range(20):
        run.step(lengths)
    assert lengths.common
    lengths.plan([])
    assert lengths.common == 0


def test_a_head_whose_second_draft_is_never_right_can_go_on_for_ever():
    """What is remembered of the last one that was right becomes 0."""
    run = Run(Machine(), 0.6)
    lengths = ConfidentLengths(25, run.confidence)
    while not lengths.common:
        run.step(lengths)
    commits = [SimpleNamespace(num_drafts=2, accepted=1, depth=None)]
    for _ in range(40_000):
        lengths.observe(commits, num_context_tokens=0, step_s=None, draft_s=0.0, elapsed_s=1e-3)
    for _ in range(BLOCK):
        lengths.plan(run.sequences)
    assert exp(run.confidence.least_continued) == pytest.approx(0.95)
