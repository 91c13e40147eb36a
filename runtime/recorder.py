"""Turns step reports into statistics. The worker writes, any thread reads."""

from __future__ import annotations

import threading
from collections.abc import Collection
from time import monotonic, time

from llmctl.runtime.config import ExecutorConfig
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.loop import Loop, StepReport
from llmctl.runtime.scheduler import Scheduler
from llmctl.runtime.stats import (
    History,
    IterationStats,
    RequestStatsPerIteration,
    SpeculationStats,
    inflight_batching_stats,
    round_stats,
    spec_decoding_stats,
)
from llmctl.runtime.tracking import TrackedRequest


class Recorder:
    """Bounded histories of steps and requests, and the totals of speculation."""

    def __init__(
        self,
        config: ExecutorConfig,
        loop: Loop,
        scheduler: Scheduler,
        kv_cache: KvCacheManager,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._num_iterations = 0
        self._max_num_active = 0
        self._lock = threading.Lock()  # guards what follows
        self._iterations: History[IterationStats] = History(config.iter_stats_max_iterations)
        self._requests: History[RequestStatsPerIteration] = History(
            config.request_stats_max_iterations
        )
        self._speculation = SpeculationStats()

    def record(
        self,
        report: StepReport,
        active: Collection[TrackedRequest],
        started: Collection[TrackedRequest],
        num_queued: int,
    ) -> None:
        """Count a step. `active` includes the requests that completed in it, a last time."""
        self._num_iterations += 1
        self._max_num_active = max(self._max_num_active, len(active))
        speculation = self._loop.stats.copy()
        iteration = requests = None
        if self._iterations.is_on:
            iteration = self._iteration(report, active, started, num_queued)
        if self._requests.is_on:
            scheduled = {commit.sequence.request_id for commit in report.commits}
            stats = tuple(item.stats(item.request_id in scheduled) for item in active)
            requests = RequestStatsPerIteration(self._num_iterations, stats)
        with self._lock:
            self._speculation = speculation
            if iteration is not None:
                self._iterations.append(iteration)
            if requests is not None:
                self._requests.append(requests)

    def drain_iterations(self) -> list[IterationStats]:
        """Steps since the last call, oldest first, as many as the history holds."""
        with self._lock:
            return self._iterations.drain()

    def drain_requests(self) -> list[RequestStatsPerIteration]:
        """Per-request counts of the steps since the last call."""
        with self._lock:
            return self._requests.drain()

    def speculation(self) -> SpeculationStats:
        """Totals so far; the caller's own copy."""
        with self._lock:
            return self._speculation.copy()

    def _iteration(
        self,
        report: StepReport,
        active: Collection[TrackedRequest],
        started: Collection[TrackedRequest],
        num_queued: int,
    ) -> IterationStats:
        began_s = monotonic() - report.step_s
        limits = self._scheduler.limits
        return IterationStats(
            timestamp=time(),
            iter=self._num_iterations,
            iter_latency_ms=report.step_s * 1e3,
            new_active_requests_queue_latency_ms=sum(
                (began_s - item.arrived_s) * 1e3 for item in started
            ),
            num_new_active_requests=len(started),
            num_active_requests=len(active),
            num_queued_requests=num_queued,
            num_completed_requests=sum(item.num_unfinished == 0 for item in active),
            max_num_active_requests=self._max_num_active,
            max_batch_size_static=limits.max_batch_size,
            max_num_tokens_static=limits.max_num_tokens,
            kv_cache_stats=self._kv_cache.stats(),
            inflight_batching_stats=inflight_batching_stats(
                report.batch, report.commits, self._scheduler.num_waiting_paused
            ),
            spec_decoding_stats=spec_decoding_stats(report.commits, report.draft_s, report.step_s),
            draft_latency_ms=report.draft_s * 1e3,
            verify_latency_ms=report.verify_s * 1e3,
            rounds=round_stats(report.batch, report.commits),
        )
