"""The front door: requests in from any thread, responses out, one worker thread in between.

Every request ends in exactly one of four ways: finished (or timed out) and cancelled requests get
a final result, refused and failed ones an error response. A step that raises fails every active
request with the error it raised; their sequences are dropped and the executor goes on with what is
queued. If even that raises, the executor closes, and whatever is left fails with that error.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from time import monotonic, time
from types import TracebackType
from typing import Literal, overload

from llmctl.errors import BadConfig, ExecutorClosed, LlmctlError, PairMismatch, QueueFull
from llmctl.plugins.sampling.reference import ArgmaxRows, argmax_rows
from llmctl.runtime.core import FinishReason, Request, Response, Sequence
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.loop import Loop, StepReport
from llmctl.runtime.mailbox import Mailbox
from llmctl.runtime.sampler import Sampler
from llmctl.runtime.scheduler import Limits, Scheduler, SchedulerConfig
from llmctl.runtime.speculative.drafter import Drafter, NoDrafter
from llmctl.runtime.stats import (
    History,
    IterationStats,
    RequestStatsPerIteration,
    SpeculationStats,
    inflight_batching_stats,
    spec_decoding_stats,
)
from llmctl.runtime.step import StepRunner
from llmctl.runtime.tracking import TrackedRequest
from llmctl.runtime.verify import Verifier


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """The paged cache; `runtime.memory.plan_kv_cache` finds num_blocks from a memory budget."""

    num_blocks: int
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Everything an executor may be told. Histories of 0 iterations are not kept."""

    kv_cache: KvCacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    acceptance: Literal["tokens", "logits"] = "tokens"  # rule for sampled requests with a draft
    max_queue_size: int | None = None  # requests that have not started; None: no limit
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    check_invariants: bool = False  # recount the KV cache whenever idle (for tests)

    def __post_init__(self) -> None:
        if self.acceptance not in ("tokens", "logits"):
            raise BadConfig(f"acceptance is {self.acceptance!r}; it must be tokens or logits")
        if self.max_queue_size is not None and self.max_queue_size < 1:
            raise BadConfig(f"max_queue_size is {self.max_queue_size}; it must be at least 1")
        for name in ("iter_stats_max_iterations", "request_stats_max_iterations"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 0")


class Executor:
    """Runs requests on a target engine, with a drafter or without. Thread-safe.

    `argmax` maps logits [rows, vocab] to ids; a backend may bring a faster one.
    """

    def __init__(
        self,
        target: StepRunner,
        drafter: Drafter | None,
        config: ExecutorConfig,
        argmax: ArgmaxRows = argmax_rows,
    ) -> None:
        self._target = target
        self._drafter = drafter if drafter is not None else NoDrafter()
        if self._drafter.max_draft_len > target.max_draft_len:
            raise PairMismatch(
                f"the drafter proposes up to {self._drafter.max_draft_len} tokens a round; "
                f"the target engine was built for max_draft_len {target.max_draft_len}",
                fix="lower the draft length, or rebuild the target with a larger --max_draft_len",
            )
        self.config = config
        cache = config.kv_cache
        self._kv_cache = KvCacheManager(
            cache.num_blocks,
            target.tokens_per_block,
            cache.enable_block_reuse,
            cache.enable_partial_reuse,
            has_draft=self._drafter.has_engine,
        )
        limits = Limits(
            max_batch_size=target.max_batch_size,
            max_num_tokens=target.max_num_tokens,
            max_seq_len=target.max_seq_len,
            max_draft_len=self._drafter.max_draft_len,
        )
        self._scheduler = Scheduler(config.scheduler, self._kv_cache, limits)
        self._sampler = Sampler(target.vocab_size, argmax)
        target.allocate_kv_cache(cache.num_blocks)
        self._drafter.prepare(self._kv_cache, self._sampler, config.acceptance == "logits")
        verifier = Verifier(self._sampler)
        self._loop = Loop(target, self._scheduler, self._kv_cache, self._drafter, verifier)

        self._mailbox = Mailbox()
        self._wake = threading.Condition()  # guards everything up to the next blank line
        self._inbox: list[TrackedRequest] = []
        self._cancelled: set[int] = set()
        self._num_queued = 0
        self._is_closed = False
        self._iteration_stats: History[IterationStats] = History(config.iter_stats_max_iterations)
        self._request_stats: History[RequestStatsPerIteration] = History(
            config.request_stats_max_iterations
        )
        self._speculation = SpeculationStats()

        self._request_ids = itertools.count(1)
        self._next_sequence_id = 1
        self._active: dict[int, TrackedRequest] = {}  # worker thread only, like all below
        self._num_iterations = 0
        self._max_num_active = 0
        self._worker = threading.Thread(target=self._work, name="llmctl-executor", daemon=True)
        self._worker.start()

    # ---- any thread ----

    def enqueue_request(self, request: Request) -> int:
        """Queue one request; returns its id at once. Raises ExecutorClosed or QueueFull."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Items[Request]) -> list[int]:
        """Queue all or none of the requests; ids in the same order."""
        limit = self.config.max_queue_size
        now = monotonic()
        with self._wake:
            if self._is_closed:
                raise ExecutorClosed("the executor has been shut down")
            if limit is not None and self._num_queued + len(requests) > limit:
                raise QueueFull(
                    f"{self._num_queued} requests are queued and {len(requests)} more exceed "
                    f"max_queue_size {limit}",
                    fix="try again later, or raise max_queue_size",
                )
            tracked = [TrackedRequest(next(self._request_ids), r, now) for r in requests]
            ids = [item.request_id for item in tracked]
            self._mailbox.open(ids)
            self._inbox += tracked
            self._num_queued += len(tracked)
            self._wake.notify()
        return ids

    @overload
    def await_responses(
        self, request_id: int | None = None, timeout_s: float | None = None
    ) -> list[Response]: ...
    @overload
    def await_responses(
        self, request_id: Items[int], timeout_s: float | None = None
    ) -> list[list[Response]]: ...
    def await_responses(
        self, request_id: int | Items[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Ready responses of any request, of one, or of each of several (a list of lists).

        Blocks until there is at least one (for each), or the timeout: then the list is empty. An
        unknown id, or one whose final response was taken, gives one error response.
        """
        if request_id is None:
            return self._mailbox.take_any(timeout_s)
        if isinstance(request_id, int):
            return self._mailbox.take(request_id, timeout_s)
        return self._mailbox.take_each(request_id, timeout_s)

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Responses that await_responses would return without waiting."""
        return self._mailbox.count(request_id)

    def cancel_request(self, request_id: int) -> None:
        """Ask for the end of a request; its final result says CANCELLED. No effect on one that
        has ended."""
        with self._wake:
            self._cancelled.add(request_id)
            self._wake.notify()

    def can_enqueue_requests(self) -> bool:
        """False once the executor is shut down."""
        with self._wake:
            return not self._is_closed

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Steps since the last call, oldest first, as many as the history holds."""
        with self._wake:
            return self._iteration_stats.drain()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Per-request counts of the steps since the last call."""
        with self._wake:
            return self._request_stats.drain()

    def get_speculation_stats(self) -> SpeculationStats:
        """Totals since the executor started."""
        with self._wake:
            return self._speculation

    def shutdown(self) -> None:
        """Cancel what is left and wait for the worker to end. Any number of times."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._worker.join()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    # ---- the worker thread ----

    def _work(self) -> None:
        try:
            while self._receive():
                self._expire()
                if self._scheduler.has_work:
                    self._step()
            self._close(None)
        except Exception as error:  # not even recovery worked: nobody may wait for ever
            self._close(error)

    def _receive(self) -> bool:
        """Wait for something to do and take in what has arrived; False on shutdown."""
        with self._wake:
            if not self._active and self.config.check_invariants:
                self._kv_cache.check_invariants()
            while not (self._inbox or self._cancelled or self._active or self._is_closed):
                self._wake.wait()
            if self._is_closed:
                return False
            if not (self._inbox or self._cancelled):
                return True
            arrived, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, set()
        for tracked in arrived:
            self._admit(tracked)
        for request_id in cancelled:
            if request_id in self._active:
                self._end(self._active[request_id], FinishReason.CANCELLED)
        return True

    def _admit(self, tracked: TrackedRequest) -> None:
        """Hand the request's sequences to the scheduler, or refuse it."""
        self._active[tracked.request_id] = tracked
        tracked.make_sequences(self._next_sequence_id, self._target.max_seq_len)
        self._next_sequence_id += len(tracked.sequences)
        ready = tracked.sequences
        if self.config.kv_cache.enable_block_reuse:
            ready, tracked.held = ready[:1], ready[1:]
        try:
            self._check(tracked.request)
            for sequence in ready:
                self._scheduler.add(sequence)
        except LlmctlError as error:
            self._fail(tracked, error)

    def _check(self, request: Request) -> None:
        """Refuse ids the engine does not know. Raises BadConfig."""
        vocab_size = self._target.vocab_size
        words = (
            ("input_token_ids", (request.input_token_ids,)),
            ("stop_words", request.stop_words),
            ("bad_words", request.bad_words),
        )
        for name, lists in words:
            for ids in lists:
                if min(ids) < 0 or max(ids) >= vocab_size:
                    found = next(token for token in ids if not 0 <= token < vocab_size)
                    raise BadConfig(
                        f"{name} holds token id {found}; the engine's ids are 0 to {vocab_size - 1}"
                    )

    def _expire(self) -> None:
        """End requests whose allotted time is over."""
        now = monotonic()
        for tracked in list(self._active.values()):
            deadline_s = tracked.deadline_s
            if deadline_s is not None and now >= deadline_s:
                self._end(tracked, FinishReason.TIMED_OUT)

    def _step(self) -> None:
        try:
            report = self._loop.step()
        except Exception as error:  # whatever it is, it belongs to the requests of this step
            self._kv_cache.pending_copies()  # those not performed are for sequences that end here
            for tracked in list(self._active.values()):
                self._fail(tracked, error)
            return
        self._deliver(report)

    def _deliver(self, report: StepReport) -> None:
        """Post what the step produced, count it, and retire what it finished."""
        started = self._start(report)
        scheduled: set[int] = set()
        responses: list[Response] = []
        completed: list[TrackedRequest] = []
        for commit in report.commits:
            sequence = commit.sequence
            tracked = self._active[sequence.request_id]
            scheduled.add(tracked.request_id)
            is_over = sequence.finish_reason is not FinishReason.NOT_FINISHED
            if is_over or (commit.num_tokens and tracked.request.streaming):
                responses.append(tracked.respond(sequence))
            if is_over:
                self._forget(sequence)
            if tracked.held and (is_over or sequence.num_new_tokens):
                held, tracked.held = tracked.held, []
                for sibling in held:
                    self._scheduler.add(sibling)
            if tracked.num_unfinished == 0:
                completed.append(tracked)
        for request_id in scheduled:
            self._active[request_id].num_iterations += 1
        self._record(report, started, completed, scheduled)
        for tracked in completed:
            del self._active[tracked.request_id]
        if responses:
            self._mailbox.post(responses)

    def _start(self, report: StepReport) -> list[TrackedRequest]:
        """Mark requests whose first slice ran in this step."""
        started = []
        for item in report.batch.context:
            tracked = self._active[item.sequence.request_id]
            if not tracked.is_started:
                tracked.is_started = True
                tracked.num_reused_tokens = item.start
                started.append(tracked)
        return started

    def _record(
        self,
        report: StepReport,
        started: list[TrackedRequest],
        completed: list[TrackedRequest],
        scheduled: set[int],
    ) -> None:
        self._max_num_active = max(self._max_num_active, len(self._active))
        self._num_iterations += 1
        with self._wake:
            self._num_queued -= len(started)
            self._speculation = self._loop.stats.copy()
            if self._iteration_stats.is_on:
                self._iteration_stats.append(self._iteration(report, started, len(completed)))
            if self._request_stats.is_on:
                known = self._active.values()
                stats = tuple(item.stats(item.request_id in scheduled) for item in known)
                self._request_stats.append(RequestStatsPerIteration(self._num_iterations, stats))

    def _iteration(
        self, report: StepReport, started: list[TrackedRequest], num_completed: int
    ) -> IterationStats:
        began_s = monotonic() - report.step_s
        return IterationStats(
            timestamp=time(),
            iter=self._num_iterations,
            iter_latency_ms=report.step_s * 1e3,
            new_active_requests_queue_latency_ms=sum(
                (began_s - item.arrived_s) * 1e3 for item in started
            ),
            num_new_active_requests=len(started),
            num_active_requests=len(self._active),
            num_queued_requests=self._num_queued,
            num_completed_requests=num_completed,
            max_num_active_requests=self._max_num_active,
            max_batch_size_static=self._target.max_batch_size,
            max_num_tokens_static=self._target.max_num_tokens,
            kv_cache_stats=self._kv_cache.stats(),
            inflight_batching_stats=inflight_batching_stats(
                report.batch, report.commits, self._scheduler.waiting
            ),
            spec_decoding_stats=spec_decoding_stats(report.commits, report.draft_s, report.step_s),
        )

    # ---- endings ----

    def _end(self, tracked: TrackedRequest, reason: FinishReason) -> None:
        """Cancelled or timed out: a final result for every sequence still running."""
        self._retire(tracked, tracked.end_unfinished(reason))

    def _fail(self, tracked: TrackedRequest, error: Exception) -> None:
        """Refused or failed: one error response ends the request."""
        self._retire(tracked, [tracked.refuse(error)])

    def _retire(self, tracked: TrackedRequest, responses: list[Response]) -> None:
        # Post before releasing: if that raises, the request has had its answer.
        del self._active[tracked.request_id]
        self._mailbox.post(responses)
        if not tracked.is_started:
            with self._wake:
                self._num_queued -= 1
        for sequence in tracked.sequences:
            if sequence not in tracked.held:
                self._scheduler.cancel(sequence)
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._drafter.release(sequence)
        self._sampler.release(sequence)

    def _close(self, error: Exception | None) -> None:
        """The worker's last act: everybody who still waits gets an answer."""
        with self._wake:
            self._is_closed = True
            left = [*self._active.values(), *self._inbox]
            self._inbox = []
            self._num_queued = 0
        for tracked in left:
            if error is not None:
                self._mailbox.post([tracked.refuse(error)])
                continue
            if not tracked.sequences:
                tracked.make_sequences(0, self._target.max_seq_len)
            self._mailbox.post(tracked.end_unfinished(FinishReason.CANCELLED))
        self._mailbox.close()
