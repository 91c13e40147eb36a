"""The statistics of the executor. Field names are those of the TensorRT-LLM executor, in
snake_case.

`IterationStats` and `RequestStats` histories are bounded and cleared by reading, like
TensorRT-LLM's `get_latest_*`; `SpeculationStats` is cumulative and reading it changes nothing.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.kv_cache import KvCacheStats
from llmctl.runtime.request import Batch
from llmctl.runtime.stats.column_table import ColumnTable

Item = TypeVar("Item")


class RequestStage(enum.Enum):
    """The stage of a request; that of its first unfinished sequence if it has several."""

    QUEUED = "queued"
    CONTEXT_IN_PROGRESS = "context_in_progress"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    GENERATION_COMPLETE = "generation_complete"


@dataclass(frozen=True, slots=True)
class InflightBatchingStats:
    """The make-up of one step. avg_num_decoded_tokens_per_iter: tokens per generation sequence."""

    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    num_ctx_tokens: int
    avg_num_decoded_tokens_per_iter: float
    micro_batch_id: int = 0  # there is one


@dataclass(frozen=True, slots=True)
class StaticBatchingStats:
    """The same where a batch starts when the last has ended; empty slots are those of sequences
    that have ended before the others."""

    num_scheduled_requests: int
    num_context_requests: int
    num_ctx_tokens: int
    num_gen_tokens: int
    empty_gen_slots: int


@dataclass(frozen=True, slots=True)
class SpecDecodingStats:
    """Drafting in one step. acceptance_length includes the target's own token; draft_overhead is
    the fraction of the step spent drafting."""

    num_draft_tokens: int
    num_accepted_tokens: int
    num_requests_with_draft_tokens: int
    acceptance_length: float
    iter_latency_ms: float  # drafting alone
    draft_overhead: float


class RoundStats(NamedTuple):
    """One generation sequence in one step; num_tokens are those it emitted, its stop included."""

    request_id: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_tokens: int
    draft_depth: int  # the most that could have been accepted: of a tree, its longest path


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One step. Times in milliseconds.

    Its end is given twice: `timestamp` in seconds since the epoch, for people, and `end_s` by
    time.monotonic, for differences, as the system's clock may be set while engines run.
    draft_latency_ms and verify_latency_ms are device time where the device runs by itself.
    """

    timestamp: float
    end_s: float
    iter: int
    iter_latency_ms: float
    new_active_requests_queue_latency_ms: float  # summed over requests that started in this step
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    max_num_active_requests: int
    max_batch_size_static: int  # the engine's
    max_batch_size_runtime: int  # the executor's
    max_num_tokens_static: int
    # the budget chosen for --max-step-ms; else the executor's limit
    max_num_tokens_tuner_recommended: int
    max_num_tokens_runtime: int
    cpu_mem_usage: int  # resident bytes of this process, at most a tenth of a second old
    # bytes that it has allocated on the device, equally recent; 0 without a device
    gpu_mem_usage: int
    pinned_mem_usage: int  # bytes of the KV cache's host tier, which the device reads directly
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    static_batching_stats: StaticBatchingStats | None  # None unless STATIC_BATCH
    spec_decoding_stats: SpecDecodingStats | None  # None in a step without drafts
    draft_latency_ms: float
    verify_latency_ms: float
    rounds: Items[RoundStats]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request after one step. Blocks are those of all its sequences since it came; see
    `KvCacheMetrics`."""

    id: int
    stage: RequestStage
    context_prefill_position: int  # of its first sequence
    num_generated_tokens: int  # over all its sequences
    avg_num_decoded_tokens_per_iter: float
    scheduled: bool  # any of its sequences ran in this step
    paused: bool
    alloc_total_blocks_per_request: int
    alloc_new_blocks_per_request: int
    reused_blocks_per_request: int
    missed_blocks_per_request: int
    kv_cache_hit_rate_per_request: float  # reused share of the blocks that were looked up
    reused_tokens_per_request: int  # found in the KV cache


@dataclass(frozen=True, slots=True)
class RequestStatsPerIteration:
    """The requests known in step `iter`; those that completed in it are listed a last time."""

    iter: int
    request_stats: tuple[RequestStats, ...]


@dataclass(slots=True)
class SpeculationStats:
    """Totals over all rounds; a round is one generation sequence in one step.

    `accepted_at_position[i]` counts rounds that accepted more than i drafts, `histogram[a]` rounds
    that accepted exactly a drafts; rounds without drafts count in histogram[0]. Times are those of
    steps with rounds, including the prompts read in them.
    """

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at_position: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    draft_s: float = 0.0  # inside the drafter
    verify_s: float = 0.0  # inside the target engine
    host_s: float = 0.0  # everything else of the steps

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all draft tokens; 0 before the first."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    def add_rounds(self, commits: Items[Commit]) -> None:
        """Count the generation sequences of one step."""
        self.rounds += len(commits)
        drafted = [commit for commit in commits if commit.num_drafts]
        if commits and not self.histogram:
            self.histogram.append(0)
        if len(drafted) < len(commits):
            self.histogram[0] += len(commits) - len(drafted)
        for commit in drafted:
            accepted = min(commit.accepted, commit.num_tokens)
            self._make_room(commit.num_drafts if commit.depth is None else commit.depth)
            self.draft_tokens += commit.num_drafts
            self.accepted_tokens += accepted
            self.histogram[accepted] += 1
            for position in range(accepted):
                self.accepted_at_position[position] += 1

    def _make_room(self, num_drafts: int) -> None:
        """Counters for every outcome of a round of so many drafts."""
        missing = num_drafts - len(self.accepted_at_position)
        if missing > 0:
            self.accepted_at_position += [0] * missing
            self.histogram += [0] * (num_drafts + 1 - len(self.histogram))

    def copy(self) -> SpeculationStats:
        """An independent snapshot."""
        return SpeculationStats(
            self.rounds,
            self.draft_tokens,
            self.accepted_tokens,
            list(self.accepted_at_position),
            list(self.histogram),
            self.draft_s,
            self.verify_s,
            self.host_s,
        )


class History(Generic[Item]):
    """The latest `max_items` items; reading removes them. Stays empty if max_items is 0."""

    def __init__(self, max_items: int) -> None:
        self.is_on = max_items > 0
        self._items: deque[Item] = deque(maxlen=max_items)

    def append(self, item: Item) -> None:
        """Add the newest item; the oldest falls out of a full history."""
        self._items.append(item)

    def drain(self) -> list[Item]:
        """All items, oldest first; the history is empty afterwards."""
        items = list(self._items)
        self._items.clear()
        return items


def inflight_batching_stats(
    batch: Batch, commits: Items[Commit], num_paused: int
) -> InflightBatchingStats:
    """The make-up of a finished step; `num_paused` sequences wait to resume."""
    generated = commits[len(batch.context) :]
    num_decoded = sum(commit.num_tokens for commit in generated)
    return InflightBatchingStats(
        num_scheduled_requests=len(commits),
        num_context_requests=len(batch.context),
        num_gen_requests=len(generated),
        num_paused_requests=num_paused,
        num_ctx_tokens=sum(item.num_tokens for item in batch.context),
        avg_num_decoded_tokens_per_iter=num_decoded / len(generated) if generated else 0.0,
    )


def static_batching_stats(
    batch: Batch, commits: Items[Commit], num_started: int
) -> StaticBatchingStats:
    """The make-up of a finished step of a batch of `num_started` sequences."""
    generated = commits[len(batch.context) :]
    return StaticBatchingStats(
        num_scheduled_requests=len(commits),
        num_context_requests=len(batch.context),
        num_ctx_tokens=sum(item.num_tokens for item in batch.context),
        num_gen_tokens=sum(commit.num_tokens for commit in generated),
        empty_gen_slots=max(0, num_started - len(commits)),
    )


def round_stats(commits: Items[Commit]) -> ColumnTable[RoundStats]:
    """What a finished step did for each of its generation sequences, in packed order."""
    rows = [
        # Drafts after a stop do not count.
        (
            *(c.sequence.request_id, c.num_drafts, min(c.accepted, c.num_tokens), c.num_tokens),
            c.num_drafts if c.depth is None else c.depth,
        )
        for c in commits
    ]
    return ColumnTable(RoundStats, "qiiii", rows)


def spec_decoding_stats(
    commits: Items[Commit], draft_s: float, step_s: float
) -> SpecDecodingStats | None:
    """What drafting did in a finished step; None when nothing was drafted."""
    drafted = [commit for commit in commits if commit.num_drafts]
    if not drafted:
        return None
    num_accepted = sum(commit.accepted for commit in drafted)
    return SpecDecodingStats(
        num_draft_tokens=sum(commit.num_drafts for commit in drafted),
        num_accepted_tokens=num_accepted,
        num_requests_with_draft_tokens=len(drafted),
        acceptance_length=1 + num_accepted / len(drafted),
        iter_latency_ms=draft_s * 1e3,
        draft_overhead=draft_s / step_s if step_s else 0.0,
    )
