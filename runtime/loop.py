"""One step of generation. `Loop.step` is the best place to start reading the runtime."""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

import numpy as np

from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.generate.verify import Verifier
from llmctl.runtime.kv_cache.block_mover import BlockMover
from llmctl.runtime.request import Batch, Sequence, Slice
from llmctl.runtime.rounds.rounds import Rounds
from llmctl.runtime.schedule.scheduler import Scheduler
from llmctl.runtime.stats.counters import SpeculationStats
from llmctl.runtime.step import Span, StepRunner, pack, slots_of

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did: one commit per slice of its batch, in packed order. Requests of which a
    sequence failed alone are left out: they end with its error."""

    batch: Batch
    commits: list[Commit]
    step_s: float
    draft_s: float
    verify_s: float
    period_s: float | None  # device time of the step; None: it could not be measured
    elapsed_s: float  # since the previous step ended
    failed: tuple[Sequence, ...] = ()


class _HostStep(NamedTuple):
    """A started step that the host controls (not a device round)."""

    batch: Batch
    drafts: list[Drafts]
    logits: Logits
    draft_s: float
    verify_began: float


class Loop:
    """Runs scheduler, drafter, target and accept rule. One thread owns it.

    `step` is `launch`, `run_ahead`, `finish` and `settle`. From `launch` to `finish` the device
    works, and the host has time for whatever the next step does not need. `run_ahead` may be
    `spare_s` later than `launch`, for requests that arrive meanwhile. Tokens are known from
    `finish` on.

    After a step that raised, its sequences are in an unknown state: cancel `touched` before the
    next step, or every active sequence if that is None.
    """

    def __init__(
        self,
        target: StepRunner,
        scheduler: Scheduler,
        mover: BlockMover,
        drafter: Drafter,
        verifier: Verifier,
        rounds: Rounds | None = None,
    ) -> None:
        self.stats = SpeculationStats()
        self.awaits_prompts = False  # whether to wait even for steps that produce no token
        self.touched: list[Sequence] | None = None  # in the last step; None: every active one
        self._target = target
        self._scheduler = scheduler
        self._mover = mover
        self._drafter = drafter
        self._verifier = verifier
        self._rounds = rounds
        self._began = 0.0  # start of the current step
        self._host_step: _HostStep | None = None  # None while a device round runs
        self._is_first_round = False
        self._is_behind = False  # the next round is still to be enqueued
        self._ended: float | None = None  # end of the last step
        self._was_round = False

    def step(self) -> StepReport:
        """One device round where possible, else one step controlled by the host. Needs
        scheduler.has_work."""
        self.launch()
        self.run_ahead()
        report = self.finish()
        self.settle(report)
        return report

    def prepare_more(self) -> bool:
        """While no sequence is active: do one more thing that steps would otherwise wait for;
        False: nothing is left."""
        return self._rounds is not None and self._rounds.prepare_more()

    @property
    def num_captured(self) -> int:
        """Graphs of rounds captured so far."""
        return 0 if self._rounds is None else self._rounds.num_captured

    def launch(self) -> None:
        """The first half of a step: schedule it and start it. Does not wait if the engine runs on a
        device and no drafts have to be made."""
        self._began = perf_counter()
        rounds = self._rounds
        self.touched = None
        self._host_step = None
        self._is_behind = False
        if rounds is not None and rounds.has_result:
            self._is_first_round = False
            self._follow(rounds)
            return
        self._mover.poll()
        batch = self._scheduler.schedule()
        assert batch.slices, "the scheduler has work and schedules none of it"
        self._mover.start()
        self.touched = [item.sequence for item in batch.slices]
        if rounds is not None and rounds.can_run(batch):
            self._in_rounds(partial(rounds.start, batch))
            self._is_first_round = True
            self._follow(rounds)
            return
        self._host_step = self._start(batch)

    def _follow(self, rounds: Rounds) -> None:
        """Enqueue the next round now if it may not wait."""
        self._is_behind = rounds.spare_s > 0
        if not self._is_behind:
            self._in_rounds(rounds.run_ahead)

    @property
    def spare_s(self) -> float:
        """Seconds for which `run_ahead` may wait for requests; not more than 0 where it may not."""
        return self._rounds.spare_s if self._rounds is not None and self._is_behind else 0.0

    def run_ahead(self) -> None:
        """Between the halves of a step: enqueue the next round, unless that was done already."""
        if self._is_behind:
            assert self._rounds is not None
            self._is_behind = False
            self._in_rounds(self._rounds.run_late)

    def finish(self) -> StepReport:
        """The second half: wait for the started step, accept, commit."""
        if self._host_step is not None:
            return self._finish_host_step(self._host_step)
        assert self._rounds is not None
        done = self._in_rounds(self._rounds.advance)
        # While one round is read the next one runs, so a round's time is measured from end to end.
        ended = perf_counter()
        elapsed_s = self._note_end(ended)
        is_steady = not self._is_first_round and self._was_round
        self._was_round = True
        times = (done.draft_s, done.verify_s, elapsed_s if is_steady else None, elapsed_s)
        return self._finish(done.batch, done.commits, *times)

    def settle(self, report: StepReport) -> None:
        """Publish the blocks of a finished step, and release the sequences that ended with it."""
        began = perf_counter()
        self._scheduler.update(report.batch)
        if report.batch.generation:
            self.stats.host_s += perf_counter() - began

    def _in_rounds(self, act: Callable[[], Outcome]) -> Outcome:
        """Run part of a round; if it raises, no round is left in flight."""
        try:
            return act()
        except BaseException:
            assert self._rounds is not None
            self._rounds.abandon()
            if self._mover.has_failed:
                self.touched = None  # failed copies lost data that any sequence may need
            raise

    def _start(self, batch: Batch) -> _HostStep:
        """Propose, and run the target."""
        self._was_round = False
        draft_began = perf_counter()
        drafts = self._drafter.propose(batch)
        draft_s = perf_counter() - draft_began
        spans = _spans(batch, drafts, self._target.takes_trees)
        step = pack(spans, self._target.tokens_per_block)
        if self._target.shares_logits and step.num_rows:
            step.best_only = self._verifier.wants_best(batch, drafts)
        verify_began = perf_counter()
        return _HostStep(batch, drafts, self._target.run(step), draft_s, verify_began)

    def _finish_host_step(self, step: _HostStep) -> StepReport:
        """Verify, accept, commit."""
        batch, drafts, logits = step.batch, step.drafts, step.logits
        owners, tokens = self._verifier.draw(batch, drafts, logits)
        verify_s = perf_counter() - step.verify_began
        was_awaited = len(logits) > 0 or isinstance(logits, np.ndarray)
        if self.awaits_prompts and not was_awaited:
            logits.queue.synchronize()
            was_awaited = True
        commits = self._verifier.commit(owners, tokens, logits)
        self._compact(commits)
        rounds = commits[len(batch.context) :]
        self._drafter.commit(batch, [commit.accepted for commit in rounds], tokens)
        ended = perf_counter()
        period_s = ended - self._began if was_awaited else None
        times = (step.draft_s, verify_s, period_s, self._note_end(ended))
        return self._finish(batch, commits, *times)

    def _compact(self, commits: list[Commit]) -> None:
        """Move the keys and values of accepted paths to the positions of their tokens."""
        size = self._target.tokens_per_block
        moves = [slots_of(c.sequence.block_table, c.moves, size) for c in commits if c.moves]
        if moves:
            self._target.compact(moves)

    def _note_end(self, ended: float) -> float:
        """Seconds from the end of the last step (if there was one, else from the start of this one)
        to the end of this step."""
        last = self._began if self._ended is None else self._ended
        self._ended = ended
        return ended - last

    def _finish(
        self,
        batch: Batch,
        commits: list[Commit],
        draft_s: float,
        verify_s: float,
        period_s: float | None,
        elapsed_s: float,
    ) -> StepReport:
        """Count."""
        failed = tuple(each.sequence for each in commits if each.sequence.error is not None)
        if failed:
            batch, commits = _without(batch, commits, {each.request_id for each in failed})
        rounds = commits[len(batch.context) :]
        step_s = perf_counter() - self._began
        if rounds:  # steps that only read prompts do not count as round time
            self.stats.add_rounds(rounds)
            self.stats.draft_s += draft_s
            self.stats.verify_s += verify_s
            self.stats.host_s += step_s - draft_s - verify_s
        return StepReport(batch, commits, step_s, draft_s, verify_s, period_s, elapsed_s, failed)


def _without(
    batch: Batch, commits: list[Commit], request_ids: Container[int]
) -> tuple[Batch, list[Commit]]:
    """What the other requests had in the step."""

    def kept(item: Slice | Commit) -> bool:
        return item.sequence.request_id not in request_ids

    others = Batch(tuple(filter(kept, batch.context)), tuple(filter(kept, batch.generation)))
    return others, list(filter(kept, commits))


def _spans(batch: Batch, drafts: Items[Drafts], takes_trees: bool) -> list[Span]:
    spans = [
        Span(
            item.sequence,
            item.start,
            item.start + item.num_tokens,
            needs_logits=item.needs_logits,
            context_end=item.sequence.context_end,
        )
        for item in batch.context
    ]
    for item, proposed in zip(batch.generation, drafts, strict=True):
        assert len(proposed.tokens) <= item.draft_len, "more drafts than blocks were reserved"
        end = item.start + item.num_tokens
        tokens, parents = proposed.tokens, proposed.parents
        assert parents is None or takes_trees, "a tree for an engine that verifies chains alone"
        spans.append(Span(item.sequence, item.start, end, tokens, parents=parents))
    return spans
