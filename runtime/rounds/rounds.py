"""Rounds on a device, one ahead of what the host has read.

A round is: draft k tokens, verify them, accept, advance. The device keeps the state for this (last
tokens, lengths, random state), so a round starts where the last one ended without the host. While
round i + 1 runs, the host reads round i, cuts it at stops, publishes blocks and sends responses:

    device   | round 1 | round 2 | round 3 |
    host     begin 1,2   commit 1, enqueue 3   commit 2 ...

For what the host does not know yet, it uses upper bounds: blocks are reserved for the most tokens
that a round in flight can add. A sequence that stopped in round i may have a round i + 1 in flight;
its result is dropped, and its writes complete before anything that a later owner of the blocks
enqueues on the same stream. If round i may bring every sequence to its last token, round i + 1
waits until that is known.

While there is room for one more sequence, round i + 1 is enqueued when half of round i is over
(spare_time.py): a prompt that arrives before that waits for round i alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmctl.runtime.drafting.drafter import DeviceDrafter
from llmctl.runtime.generate.commit import Commit, commit
from llmctl.runtime.generate.sampler import bad_logits
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Batch, Sequence, Slice
from llmctl.runtime.rounds.spare_time import SpareTime
from llmctl.runtime.schedule.scheduler import Scheduler

MOST_IN_FLIGHT = 2


class RoundResult(NamedTuple):
    """What one round added to one sequence: the accepted drafts, then the target's own token."""

    num_committed: int  # tokens before the round
    tokens: list[int]  # accepted + 1
    num_drafts: int  # that there were, of those that were asked for


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A finished round, one result per sequence in the order of `begin`."""

    results: list[RoundResult]
    draft_s: float  # device time of drafting, and of reading what was committed for the next
    verify_s: float  # device time of verification and acceptance


class RoundRunner(Protocol):
    """A device that can run rounds without the host."""

    drafter: DeviceDrafter
    max_batch_size: int  # sequences
    max_tokens: int  # no position of a round may be beyond this many tokens

    def can_run(self, sequence: Sequence) -> bool:
        """True when the device can draw every further token of this sequence without the host."""

    def prepare(self, max_batch_size: int, max_num_tokens: int) -> None:
        """Called once, when the caches exist: prepare what rounds of up to so many sequences, and
        steps with prompts of up to so many tokens, would otherwise have to do at first use."""

    def prepare_more(self) -> bool:
        """Called while there are no sequences: do one more thing in advance, in no longer than a
        capture takes; False: nothing is left. No round is in flight, and the next one comes after
        `begin`."""

    @property
    def num_captured(self) -> int:
        """Graphs captured so far, each while whatever came next waited."""

    def begin(self, sequences: Items[Sequence]) -> None:
        """Make these the sequences of the next rounds, in the state that the host sees now."""

    def enqueue(self, block_tables: Items[Items[int]], draft_len: int) -> None:
        """Start one more round with so many drafts after all work on the device. Does not wait."""

    def collect(self) -> RoundReport:
        """Wait for the oldest round in flight."""

    def abandon(self) -> None:
        """Forget all rounds in flight, after waiting for them. Never raises."""


class RoundStep(NamedTuple):
    """One committed round, as the loop reports it."""

    batch: Batch
    commits: list[Commit]
    draft_s: float
    verify_s: float


class Rounds:
    """Keeps the device busy with generation while the host works one round behind it."""

    def __init__(
        self,
        runner: RoundRunner,
        scheduler: Scheduler,
        kv_cache: KvCacheManager,
        copy_blocks: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._copy_blocks = copy_blocks  # starts the pending copies of every cache
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._resident: list[Sequence] = []
        self._last_read: list[RoundResult] = []  # the last results that the host has read
        self._in_flight: deque[int] = deque()  # the draft lengths of rounds enqueued
        self._spare = SpareTime()

    @property
    def has_result(self) -> bool:
        """True while a round in flight has results that are still needed."""
        return bool(self._in_flight) and any(map(self._is_running, self._resident))

    @property
    def num_captured(self) -> int:
        """Graphs captured so far."""
        return self._runner.num_captured

    def prepare_more(self) -> bool:
        """See RoundRunner; for when no sequence is active."""
        self._drop_in_flight()
        self._resident, self._last_read = [], []
        return self._runner.prepare_more()

    def can_run(self, batch: Batch) -> bool:
        """True for a step without prompts that the device can run without the host."""
        runner = self._runner
        draft_len = self._common_length([item.sequence for item in batch.generation])
        if batch.context or not 0 < len(batch.generation) <= runner.max_batch_size:
            return False
        if draft_len is None:
            return False
        for item in batch.generation:
            sequence = item.sequence
            committed = len(sequence.tokens)
            is_short = item.draft_len < min(draft_len, sequence.max_len - committed - 1)
            is_long = committed + draft_len > runner.max_tokens
            if is_short or is_long or not runner.can_run(sequence):
                return False
        return True

    def start(self, batch: Batch) -> None:
        """Enqueue a step for which `can_run` holds."""
        self._drop_in_flight()
        sequences = [item.sequence for item in batch.generation]
        ends = [result.num_committed + len(result.tokens) for result in self._last_read]
        is_known = sequences == self._resident and [len(s.tokens) for s in sequences] == ends
        draft_len = self._common_length(sequences)
        assert draft_len is not None, "start without can_run"
        drafter = self._runner.drafter
        behind = [item for item in sequences if draft_len and drafter.is_behind(item)]
        if behind:
            drafter.catch_up(behind)
        if behind or not is_known:
            self._runner.begin(sequences)
            self._resident = sequences
        self._enqueue(draft_len)

    @property
    def spare_s(self) -> float:
        """Seconds, if more than 0, for which the round after the one in flight may still wait for a
        prompt that would come before it."""
        scheduler = self._scheduler
        has_room = scheduler.num_active < scheduler.limits.max_batch_size
        return self._spare.seconds if has_room else 0.0

    def run_late(self) -> None:
        """`run_ahead`, after a wait for prompts."""
        self._spare.note_wait()
        self.run_ahead()

    def run_ahead(self) -> None:
        """Start the round after the one in flight if nothing prevents it."""
        if len(self._in_flight) < MOST_IN_FLIGHT:
            draft_len = self._length_ahead()
            if draft_len is not None and self._may_run_ahead(draft_len):
                self._enqueue(draft_len)

    def advance(self) -> RoundStep:
        """Commit the oldest round in flight."""
        report = self._runner.collect()
        draft_len = self._in_flight.popleft()
        self._spare.note_end(report.draft_s + report.verify_s)
        self._last_read = report.results
        slices, commits = [], []
        for sequence, result in zip(self._resident, report.results, strict=True):
            if self._is_running(sequence):
                item, commit = self._commit(sequence, result, draft_len)
                slices.append(item)
                commits.append(commit)
        return RoundStep(Batch((), tuple(slices)), commits, report.draft_s, report.verify_s)

    def abandon(self) -> None:
        """After a failure: nothing in flight, nothing resident."""
        self._runner.abandon()
        self._in_flight.clear()
        self._resident, self._last_read = [], []

    def _is_running(self, sequence: Sequence) -> bool:
        return self._scheduler.is_active(sequence)

    def _common_length(self, sequences: Items[Sequence]) -> int | None:
        """The draft length planned for all of these; None: they differ."""
        common = self._scheduler.draft_lengths.common
        if common is None or not self._runner.drafter.draft_len:
            return common
        caps = [sequence.request.max_draft_len for sequence in sequences]
        return None if any(cap is not None and cap < common for cap in caps) else common

    def _length_ahead(self) -> int | None:
        """The draft length of the round after those in flight; None: it must wait."""
        self._scheduler.draft_lengths.plan(self._resident)
        draft_len = self._common_length(self._resident)
        if draft_len and self._runner.drafter.falls_behind and 0 in self._in_flight:
            return None
        return draft_len

    def _enqueue(self, draft_len: int) -> None:
        tables = [sequence.block_table for sequence in self._resident]
        if not self._in_flight:
            self._spare.note_begin()
        self._runner.enqueue(tables, draft_len)
        self._in_flight.append(draft_len)

    def _drop_in_flight(self) -> None:
        """Drop rounds left over from sequences that have all ended."""
        while self._in_flight:
            self._runner.collect()
            self._in_flight.popleft()
            self._last_read = []

    def _may_run_ahead(self, draft_len: int) -> bool:
        """True when the next round, with so many drafts, is certain to have the same sequences."""
        scheduler = self._scheduler
        has_room = scheduler.num_active < scheduler.limits.max_batch_size
        if (scheduler.num_waiting and has_room) or scheduler.num_active != len(self._resident):
            return False
        # the most tokens of the round in flight
        most = max(map(self._runner.drafter.depth, self._in_flight)) + 1
        if all(len(item.tokens) + most >= item.max_len for item in self._resident):
            # It may end all sequences, and the next work would wait for a round that is not needed.
            return False
        for sequence in self._resident:
            committed = len(sequence.tokens)
            is_last = committed + 1 >= sequence.max_len  # the round in flight ends it
            is_long = committed + most + draft_len > self._runner.max_tokens
            if is_last or is_long or not self._is_running(sequence):
                return False
        for sequence in self._resident:
            # The last token never enters the cache; positions without a block are not written.
            wanted = min(len(sequence.tokens) + most + draft_len + 1, sequence.max_len - 1)
            if not self._kv_cache.reserve(sequence, wanted):
                return False
        self._copy_blocks()  # allocating these may have evicted blocks to host memory
        return True

    def _commit(
        self, sequence: Sequence, result: RoundResult, draft_len: int
    ) -> tuple[Slice, Commit]:
        """Append the tokens of the round, cut at the first stop. Where one is none, the sequence
        fails."""
        committed, run = len(sequence.tokens), result.tokens
        assert result.num_committed == committed, "host and device disagree on a length"
        if min(run) < 0:
            sequence.fail(bad_logits("target", run))
            return Slice(sequence, committed - 1, 1, 0), Commit(sequence, 0)
        num_drafts, accepted = result.num_drafts, len(run) - 1
        # The device has moved the keys of a tree's path to where a chain's are.
        done = commit(sequence, run, range(accepted), num_drafts)
        drafter = self._runner.drafter
        if draft_len or drafter.reads(draft_len):
            drafter.note(sequence, committed, accepted, draft_len)
        if draft_len:
            asked = min(draft_len, sequence.max_len - committed - 1)
            depth = drafter.depth(num_drafts)
            if depth < num_drafts:
                done = done._replace(depth=depth)
            if num_drafts < asked:
                done = done._replace(num_asked=asked)
        return Slice(sequence, committed - 1, 1, num_drafts), done
