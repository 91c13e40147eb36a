"""Turns step reports into statistics. The worker writes, any thread reads."""

from __future__ import annotations

import threading
from collections.abc import Collection
from time import monotonic, time
from typing import NamedTuple

from llmctl.runtime.api.executor_config import ExecutorConfig
from llmctl.runtime.api.tracking import TrackedRequest
from llmctl.runtime.kv_cache import KvCacheManager, KvCacheStats
from llmctl.runtime.loop import Loop, StepReport
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, Limits, Scheduler
from llmctl.runtime.stats.counters import (
    History,
    IterationStats,
    RequestStatsPerIteration,
    SpeculationStats,
    StaticBatchingStats,
    inflight_batching_stats,
    round_stats,
    spec_decoding_stats,
    static_batching_stats,
)
from llmctl.runtime.stats.process_memory import MemoryUsage, pinned_bytes


class Moment(NamedTuple):
    """Queue lengths and memory at the end of a step, before the next one changes them."""

    timestamp: float  # seconds since the epoch
    now_s: float  # monotonic
    num_active: int  # requests, those that ended in the step included
    num_queued: int
    num_paused: int  # sequences
    is_drained: bool  # no sequence runs any more
    token_budget: int
    kv_cache_stats: KvCacheStats


class Recorder:
    """Bounded histories of steps and requests, and the totals of speculation."""

    def __init__(
        self,
        config: ExecutorConfig,
        loop: Loop,
        scheduler: Scheduler,
        kv_cache: KvCacheManager,
        engine_limits: Limits,
    ) -> None:
        self._engine_limits = engine_limits
        policy = config.scheduler.capacity_scheduler_policy
        self._is_static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._num_in_batch = 0  # sequences of the running static batch
        self._loop = loop
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._memory = MemoryUsage()
        self._num_iterations = 0
        self._max_num_active = 0
        self._lock = threading.Lock()  # guards what follows
        self._iterations: History[IterationStats] = History(config.iter_stats_max_iterations)
        self._requests: History[RequestStatsPerIteration] = History(
            config.request_stats_max_iterations
        )
        self._speculation = SpeculationStats()

    @property
    def num_iterations(self) -> int:
        """Steps so far."""
        return self._num_iterations

    @property
    def is_prompt(self) -> bool:
        """True where a step must be recorded before the next one is planned."""
        return self._requests.is_on

    def look(self, num_active: int, num_queued: int) -> Moment:
        """Record the state of this moment that `record` will need."""
        scheduler = self._scheduler
        return Moment(
            time(),
            monotonic(),
            num_active,
            num_queued,
            scheduler.num_waiting_paused,
            not scheduler.num_active,
            scheduler.token_budget,
            self._kv_cache.stats(),
        )

    def record(
        self,
        report: StepReport,
        moment: Moment,
        active: Collection[TrackedRequest],
        started: Collection[TrackedRequest],
        num_completed: int,
    ) -> None:
        """Count a step. `active` includes the requests that completed in it, a last time."""
        self._num_iterations += 1
        self._max_num_active = max(self._max_num_active, moment.num_active)
        speculation = self._loop.stats.copy()
        iteration = requests = None
        if self._iterations.is_on:
            iteration = self._iteration(report, moment, started, num_completed)
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
        moment: Moment,
        started: Collection[TrackedRequest],
        num_completed: int,
    ) -> IterationStats:
        began_s = moment.now_s - report.step_s
        on_host, on_device = self._memory.read()
        limits = self._scheduler.limits
        return IterationStats(
            timestamp=moment.timestamp,
            end_s=moment.now_s,
            iter=self._num_iterations,
            iter_latency_ms=report.step_s * 1e3,
            new_active_requests_queue_latency_ms=sum(
                (began_s - item.arrived_s) * 1e3 for item in started
            ),
            num_new_active_requests=len(started),
            num_active_requests=moment.num_active,
            num_queued_requests=moment.num_queued,
            num_completed_requests=num_completed,
            max_num_active_requests=self._max_num_active,
            max_batch_size_static=self._engine_limits.max_batch_size,
            max_batch_size_runtime=limits.max_batch_size,
            max_num_tokens_static=self._engine_limits.max_num_tokens,
            max_num_tokens_tuner_recommended=moment.token_budget,
            max_num_tokens_runtime=limits.max_num_tokens,
            cpu_mem_usage=on_host,
            gpu_mem_usage=on_device,
            pinned_mem_usage=pinned_bytes(),
            kv_cache_stats=moment.kv_cache_stats,
            inflight_batching_stats=inflight_batching_stats(
                report.batch, report.commits, moment.num_paused
            ),
            static_batching_stats=self._static_stats(report, moment),
            spec_decoding_stats=spec_decoding_stats(report.commits, report.draft_s, report.step_s),
            draft_latency_ms=report.draft_s * 1e3,
            verify_latency_ms=report.verify_s * 1e3,
            rounds=round_stats(report.commits[len(report.batch.context) :]),
        )

    def _static_stats(self, report: StepReport, moment: Moment) -> StaticBatchingStats | None:
        if not self._is_static:
            return None
        self._num_in_batch = max(self._num_in_batch, len(report.commits))
        stats = static_batching_stats(report.batch, report.commits, self._num_in_batch)
        if moment.is_drained:
            self._num_in_batch = 0
        return stats
