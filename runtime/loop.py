"""One step of generation. `Loop.step` is the table of contents of the runtime."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import perf_counter

from llmctl.runtime.core import Batch, Sequence
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.rounds import Rounds
from llmctl.runtime.scheduler import Scheduler
from llmctl.runtime.speculative.drafter import Drafter, Proposal
from llmctl.runtime.stats import SpeculationStats
from llmctl.runtime.step import Span, StepRunner, pack
from llmctl.runtime.verify import Commit, Verifier


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did: one commit per slice of its batch, in packed order."""

    batch: Batch
    commits: list[Commit]
    step_s: float
    draft_s: float
    verify_s: float
    period_s: float | None  # the time it took of the device; None: not to be seen


class Loop:
    """Drives scheduler, drafter, target and accept rule. One thread owns it.

    After a step that raised, the sequences it touched are in an unknown state: cancel `touched`
    before the next step, or every active one where that is None.
    """

    def __init__(
        self,
        target: StepRunner,
        scheduler: Scheduler,
        kv_cache: KvCacheManager,
        drafter: Drafter,
        verifier: Verifier,
        rounds: Rounds | None = None,
    ) -> None:
        self.stats = SpeculationStats()
        self.touched: list[Sequence] | None = None  # by the last step; None: every active one
        self._target = target
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._drafter = drafter
        self._verifier = verifier
        self._rounds = rounds
        self._round_ended: float | None = None  # when the last step was a round

    def step(self) -> StepReport:
        """One round by the device alone where it can, else one step led by the host. Needs
        scheduler.has_work."""
        began = perf_counter()
        rounds = self._rounds
        self.touched = None
        if rounds is not None and rounds.has_result:
            return self._run_round(rounds, None, began)
        batch = self._scheduler.schedule()
        assert batch.slices, "the scheduler has work and schedules none of it"
        copy_blocks(self._kv_cache, self._target, self._drafter)
        self.touched = [item.sequence for item in batch.slices]
        if rounds is not None and rounds.can_run(batch):
            return self._run_round(rounds, batch, began)
        return self._run_step(batch, began)

    def _run_round(self, rounds: Rounds, batch: Batch | None, began: float) -> StepReport:
        """Start with `batch`, or take the oldest round in flight; commit it."""
        try:
            done = rounds.advance() if batch is None else rounds.start(batch)
        except BaseException:
            rounds.abandon()
            raise
        # While one round is read the next one runs: only from end to end is a round's time seen.
        ended = perf_counter()
        period_s = None
        if batch is None and self._round_ended is not None:
            period_s = ended - self._round_ended
        self._round_ended = ended
        return self._finish(done.batch, done.commits, began, done.draft_s, done.verify_s, period_s)

    def _run_step(self, batch: Batch, began: float) -> StepReport:
        """Propose, verify, accept, commit."""
        self._round_ended = None
        draft_began = perf_counter()
        proposals = self._drafter.propose(batch)
        draft_ended = perf_counter()
        step = pack(_spans(batch, proposals), self._target.tokens_per_block)
        verify_began = perf_counter()
        logits = self._target.run(step)
        verify_ended = perf_counter()
        commits = self._verifier.commit(batch, proposals, logits)
        rounds = commits[len(batch.context) :]
        self._drafter.commit(batch, [commit.accepted for commit in rounds])
        draft_s, verify_s = draft_ended - draft_began, verify_ended - verify_began
        return self._finish(batch, commits, began, draft_s, verify_s, perf_counter() - began)

    def _finish(
        self,
        batch: Batch,
        commits: list[Commit],
        began: float,
        draft_s: float,
        verify_s: float,
        period_s: float | None,
    ) -> StepReport:
        """Publish, release, count."""
        self._scheduler.update(batch)
        for commit in commits[len(batch.context) :]:
            self.stats.add_round(commit.num_drafts, min(commit.accepted, commit.num_tokens))
        step_s = perf_counter() - began
        self.stats.draft_s += draft_s
        self.stats.verify_s += verify_s
        self.stats.host_s += step_s - draft_s - verify_s
        return StepReport(batch, commits, step_s, draft_s, verify_s, period_s)


def copy_blocks(kv_cache: KvCacheManager, target: StepRunner, drafter: Drafter) -> None:
    """Partly matching blocks become private copies, evicted ones go to host memory and those hit
    there come back, in every cache, in the manager's order."""
    copies = kv_cache.pending_copies()
    if copies:
        target.copy_blocks(copies)
        drafter.copy_blocks(copies)


def _spans(batch: Batch, proposals: Items[Proposal]) -> list[Span]:
    spans = [
        Span(item.sequence, item.start, item.start + item.num_tokens, (), item.needs_logits)
        for item in batch.context
    ]
    for item, proposal in zip(batch.generation, proposals, strict=True):
        assert len(proposal.token_ids) <= item.draft_len, "more drafts than blocks were reserved"
        end = item.start + item.num_tokens
        spans.append(Span(item.sequence, item.start, end, proposal.token_ids))
    return spans
