"""Raw data of a benchmark: what was requested, when responses arrived, what every step did.

Every figure of a report is computed from these (cli/bench/metrics.py). Times are seconds since the
first request of their iteration was submitted, on one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import monotonic
from typing import Any, NamedTuple

from llmctl.runtime.stats.column_table import ColumnTable
from llmctl.runtime.stats.counters import IterationStats


class Arrival(NamedTuple):
    """A response that carried tokens."""

    at_s: float
    num_tokens: int


class Round(NamedTuple):
    """One request in one step of generation."""

    request: int  # index of the request
    draft_tokens: int
    accepted_tokens: int
    tokens: int  # the target's own included
    draft_depth: int  # drafts that could have been accepted: of a tree, its longest path


@dataclass(slots=True)
class RequestRecord:
    """One request. `due_s` is when it should have been submitted; error is "Class: message"."""

    index: int
    iteration: int
    input_tokens: int
    asked_tokens: int
    due_s: float
    submit_s: float | None = None
    arrivals: ColumnTable[Arrival] = field(default_factory=lambda: ColumnTable(Arrival, "di"))
    output_ids: list[int] = field(default_factory=list)
    is_done: bool = False
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A line of --raw."""
        return {"kind": "request", **_as_dict(self)}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the executor. draft_ms and verify_ms are device time on a GPU."""

    iteration: int
    end_s: float
    step_ms: float
    draft_ms: float
    verify_ms: float
    context_requests: int
    context_tokens: int
    active_requests: int
    queued_requests: int
    kv_used_blocks: int
    kv_max_blocks: int
    rounds: Sequence[Round]

    @property
    def host_ms(self) -> float:
        """The remainder of the step. Negative if the device ran ahead of the host."""
        return self.step_ms - self.draft_ms - self.verify_ms

    @property
    def num_tokens(self) -> int:
        """Tokens that the target computed: prompt chunks, roots and drafts."""
        return self.context_tokens + sum(1 + item.draft_tokens for item in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """A line of --raw."""
        return {"kind": "step", **_as_dict(self)}


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = monotonic()

    def now_s(self) -> float:
        """Seconds so far."""
        return monotonic() - self._began_s

    def at_s(self, moment_s: float) -> float:
        """The same for a time of time.monotonic."""
        return moment_s - self._began_s


@dataclass(slots=True)
class Recording:
    """Everything recorded for one way of running a load."""

    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    num_iterations: int = 0
    num_graphs_captured: int = 0  # CUDA graphs, while requests ran

    def add_steps(
        self, stats: Sequence[IterationStats], clock: Clock, indexes: dict[int, int]
    ) -> None:
        """Append steps; `indexes` gives the index of the request with an executor's id."""
        self.steps += [_step(item, self.num_iterations - 1, clock, indexes) for item in stats]

    @property
    def done(self) -> list[RequestRecord]:
        """Requests that ended well."""
        return [item for item in self.requests if item.is_done]


def _step(
    item: IterationStats, iteration: int, clock: Clock, indexes: dict[int, int]
) -> StepRecord:
    cache, batch = item.kv_cache_stats, item.inflight_batching_stats
    return StepRecord(
        iteration=iteration,
        end_s=clock.at_s(item.end_s),
        step_ms=item.iter_latency_ms,
        draft_ms=item.draft_latency_ms,
        verify_ms=item.verify_latency_ms,
        context_requests=batch.num_context_requests,
        context_tokens=batch.num_ctx_tokens,
        active_requests=item.num_active_requests,
        queued_requests=item.num_queued_requests,
        kv_used_blocks=cache.used_num_blocks,
        kv_max_blocks=cache.max_num_blocks,
        rounds=ColumnTable(
            Round, "qiiii", ((indexes[request_id], *rest) for request_id, *rest in item.rounds)
        ),
    )


def _as_dict(record: RequestRecord | StepRecord) -> dict[str, Any]:
    """Fields by name, rows as lists."""
    named = ((item.name, getattr(record, item.name)) for item in fields(record))
    return {name: list(v) if isinstance(v, ColumnTable) else v for name, v in named}
