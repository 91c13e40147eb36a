"""The executor's thread: receives requests, steps the loop, sends responses.

Every request ends in exactly one of four ways: finished (or timed out) and cancelled requests get a
final result, refused and failed ones an error response. A request whose own logits are no numbers
fails alone. A step that raises fails every request in it with the error it raised; their sequences
are dropped and the worker continues with the others. If even that raises, the executor closes, and
all remaining requests fail with that error.
"""

from __future__ import annotations

from functools import partial
from threading import Event
from time import monotonic

from llmctl.runtime.api.delivery import Delivery
from llmctl.runtime.api.executor_config import ExecutorConfig
from llmctl.runtime.api.inbox import Inbox
from llmctl.runtime.api.mailbox import Mailbox
from llmctl.runtime.api.tracking import TrackedRequest
from llmctl.runtime.assembly import Parts
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.loop import StepReport
from llmctl.runtime.request import FinishReason, Sequence
from llmctl.runtime.response import Response
from llmctl.runtime.schedule.admission import check_token_ids

IDLE_S = 0.05  # without requests, before graphs are captured ahead of need


class Worker:
    """Runs the parts that `assemble` has connected. `run` is the body of the executor's thread."""

    def __init__(
        self, parts: Parts, config: ExecutorConfig, inbox: Inbox, mailbox: Mailbox
    ) -> None:
        self.kv_cache = parts.kv_cache
        self.scheduler = parts.scheduler
        self.recorder = parts.recorder
        self._loop = parts.loop
        self._lengths, self._tuner = parts.lengths, parts.tuner
        self._config = config
        self._target = parts.target
        self._check_drafting = parts.drafter.check
        self._sampler = parts.sampler
        self._inbox = inbox
        self._mailbox = mailbox
        self._active: dict[int, TrackedRequest] = {}  # requests that have not ended, by id
        self._next_sequence_id = 1
        self.is_settled = Event()  # no request since, and nothing left to do in advance
        # Neither refers to this worker: in a reference cycle its graphs and scratch would outlive
        # the executor.
        self._forget = partial(_forget, parts.drafter, self._sampler)
        self._delivery = Delivery(self._active, self.recorder, mailbox, self._forget)
        # Delayed until the device has its next step; not if the host computes steps or waits for
        # drafts.
        is_soon = parts.target.is_asynchronous and not parts.drafter.max_draft_len
        self._defers = is_soon and not self.recorder.is_prompt

    @property
    def num_graphs_captured(self) -> int:
        """See Executor."""
        return self._loop.num_captured

    def run(self) -> None:
        """Work until the inbox is closed; then end all remaining requests."""
        try:
            while self._receive():
                self._expire()
                if self.scheduler.has_work:
                    self._step()
            self._close(None)
        except Exception as error:  # recovery failed, too: no caller may be left waiting
            self._close(error)

    def _receive(self) -> bool:
        """Receive what has arrived, waiting for it when idle; False when the inbox is closed."""
        is_idle = not self._active
        if is_idle and self._config.check_invariants:
            self.kv_cache.check_invariants()
        if is_idle:
            self._prepare_while_idle()
        update = self._inbox.receive(is_idle)
        if update.cancelled:
            self._delivery.flush()
        self._take(update.arrived)
        for request_id in update.cancelled:
            if request_id in self._active:
                self._end(self._active[request_id], FinishReason.CANCELLED)
        return not update.is_closed or (update.drains and bool(self._active))

    def _take(self, arrived: list[TrackedRequest]) -> None:
        """Admit these requests."""
        if arrived:
            self.is_settled.clear()
        self._active |= {tracked.request_id: tracked for tracked in arrived}
        for tracked in arrived:
            self._admit(tracked)

    def _prepare_while_idle(self) -> None:
        """Capture graphs ahead of need until something arrives or nothing is left. The pause before
        it is for requests that come one after another, which should not wait for a capture."""
        pause_s = IDLE_S
        while self._inbox.stays_empty(pause_s):
            pause_s = 0.0
            if not self._loop.prepare_more():
                self.is_settled.set()
                return

    def _admit(self, tracked: TrackedRequest) -> None:
        """Give the request's sequences to the scheduler, or refuse it."""
        try:
            check_token_ids(tracked.request, self._target.vocab_size)
            self._check_drafting(tracked.request)
            self._config.check_acceptance(tracked.request)
            self._make_sequences(tracked)
            self._next_sequence_id += len(tracked.sequences)
            ready = tracked.sequences
            if self._config.kv_cache.enable_block_reuse:
                ready, tracked.held = ready[:1], ready[1:]
            for sequence in ready:
                self.scheduler.add(sequence)
            tracked.pack_prompt()  # while the device has rounds, not when a step waits for it
        except Exception as error:  # any error here is that of this request
            self._fail(tracked, error)

    def _make_sequences(self, tracked: TrackedRequest) -> None:
        target = self._target
        tracked.make_sequences(self._next_sequence_id, target.max_seq_len, target.context_group)

    def _expire(self) -> None:
        """End requests whose allotted time is over."""
        late = [item.request_id for item in self._active.values() if item.is_out_of_time]
        if late:
            self._delivery.flush()
        for request_id in late:
            if request_id in self._active:  # else it has ended in the meantime
                self._end(self._active[request_id], FinishReason.TIMED_OUT)

    def _step(self) -> None:
        """Start a step, deliver the results of the previous one meanwhile, and finish it."""
        try:
            self._loop.launch()
        except Exception as error:  # any error here is that of the requests in this step
            self._delivery.flush()
            self._fail_step(error)
            return
        self._delivery.flush()
        try:
            if (spare_s := self._loop.spare_s) > 0:
                self._take(self._inbox.arrivals(spare_s))
            self._loop.run_ahead()
            report = self._loop.finish()
            for sequence in report.failed:
                self._fail_alone(sequence)
            if self._defers:
                self._delivery.post_first_tokens(report)
            self._loop.settle(report)
        except Exception as error:  # the same
            self._fail_step(error)
            return
        self._learn(report)
        started = self._note_started(report)
        self._delivery.hold(report, started, self._inbox.num_queued)
        if not self._defers or not self.scheduler.has_work:
            self._delivery.flush()

    def _learn(self, report: StepReport) -> None:
        """Update the limit for prompt chunks from the measured step."""
        if self._lengths is not None:
            context = report.batch.context
            self._lengths.observe(
                report.commits[len(context) :],
                num_context_tokens=sum(item.num_tokens for item in context),
                step_s=report.period_s,
                draft_s=report.draft_s,
                elapsed_s=report.elapsed_s,
            )
        if self._tuner is not None and report.batch.context:
            num_drafts = sum(commit.num_drafts for commit in report.commits)
            num_tokens = num_drafts + sum(item.num_tokens for item in report.batch.slices)
            is_seen = report.period_s is not None
            self._tuner.observe(num_tokens, report.step_s, was_awaited=is_seen)
            self.scheduler.set_token_budget(self._tuner.budget)
            self._loop.awaits_prompts = self._tuner.wants_wait

    def _fail_alone(self, sequence: Sequence) -> None:
        """Fail the request of a sequence that failed, unless another one of its has."""
        if sequence.error is not None and sequence.request_id in self._active:
            self._fail(self._active[sequence.request_id], sequence.error)

    def _fail_step(self, error: Exception) -> None:
        """Fail the requests in the step, and no others."""
        touched = self._loop.touched
        ids = {s.request_id for s in (self.scheduler.active if touched is None else touched)}
        for request_id in ids & self._active.keys():  # some may have failed alone
            self._fail(self._active[request_id], error)
        if touched is None:  # perhaps before its copies were complete
            self.kv_cache.abandon_copies()

    def _note_started(self, report: StepReport) -> list[TrackedRequest]:
        """The requests whose first slice ran in this step. Sequences that waited for a prompt to be
        in the cache are now given to the scheduler."""
        started = []
        for item, commit in zip(report.batch.context, report.commits, strict=False):
            tracked = self._active[item.sequence.request_id]
            if not tracked.is_started:
                tracked.is_started = True
                tracked.trace.first_scheduled_s = monotonic() - report.step_s
                started.append(tracked)
            if tracked.held and commit.num_tokens:
                held, tracked.held = tracked.held, []
                for sibling in held:
                    self.scheduler.add(sibling)
        if started:
            self._inbox.leave_queue(len(started))
        return started

    def _end(self, tracked: TrackedRequest, reason: FinishReason) -> None:
        """Cancelled or timed out: a final result for every sequence still running."""
        self._retire(tracked, tracked.end_unfinished(reason))

    def _fail(self, tracked: TrackedRequest, error: Exception) -> None:
        """Refused or failed: one error response ends the request."""
        self._retire(tracked, [tracked.refuse(error)])

    def _retire(self, tracked: TrackedRequest, responses: list[Response]) -> None:
        # Post before releasing, so that the request has its response even if releasing raises.
        del self._active[tracked.request_id]
        if not tracked.is_started:  # before whoever reads its end takes its place in the queue
            self._inbox.leave_queue(1)
        self._mailbox.post(responses)
        for sequence in tracked.sequences:
            self.scheduler.cancel(sequence)
            self._forget(sequence)

    def _close(self, error: Exception | None) -> None:
        """Shut down: every waiting caller gets a response. May be called again with the error that
        the first call raised."""
        if error is None:
            self._delivery.flush()
        self._inbox.close(error=error)
        arrived = self._inbox.receive(is_idle=False).arrived
        self._active |= {tracked.request_id: tracked for tracked in arrived}
        if error is None:
            for tracked in arrived:
                self._make_sequences(tracked)
            for tracked in list(self._active.values()):
                self._end(tracked, FinishReason.CANCELLED)
        else:  # nothing is released: the state may be inconsistent
            while self._active:
                self._mailbox.post([self._active.popitem()[1].refuse(error)])
        self._mailbox.close()


def _forget(drafter: Drafter, sampler: Sampler, sequence: Sequence) -> None:
    drafter.release(sequence)
    sampler.release(sequence)
