"""Cost and times of one request, returned with its final result if requested.

Field names are those of the TensorRT-LLM executor, in snake_case. Times are seconds on the clock of
`time.monotonic`.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.runtime.request import Sequence


@dataclass(frozen=True, slots=True)
class TimingMetrics:
    """None: that stage was not reached."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None


@dataclass(frozen=True, slots=True)
class KvCacheMetrics:
    """KV blocks of all sequences of a request, over its life. New ones were taken to write (a
    partly matching block is copied to one), reused ones found in the cache; missed are those of
    prompts, and of what resumes after a pause, that were not found."""

    num_total_allocated_blocks: int
    num_new_allocated_blocks: int
    num_reused_blocks: int
    num_missed_blocks: int

    @property
    def kv_cache_hit_rate(self) -> float:
        """Found share of the blocks that were looked up; 0 before the first."""
        asked = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / asked if asked else 0.0


def kv_cache_metrics(sequences: list[Sequence]) -> KvCacheMetrics:
    """The blocks of these sequences so far."""
    counts = [sequence.blocks for sequence in sequences]
    num_new = sum(count.num_new for count in counts)
    return KvCacheMetrics(
        num_total_allocated_blocks=num_new + sum(count.num_shared for count in counts),
        num_new_allocated_blocks=num_new,
        num_reused_blocks=sum(count.num_reused for count in counts),
        num_missed_blocks=sum(count.num_missed for count in counts),
    )


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingMetrics:
    """Drafts over all rounds of a request."""

    total_draft_tokens: int
    total_accepted_draft_tokens: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted share; 0 without drafts."""
        return self.total_accepted_draft_tokens / max(1, self.total_draft_tokens)


@dataclass(frozen=True, slots=True)
class RequestPerfMetrics:
    """first_iter and last_iter number the steps of the executor, from 1."""

    timing: TimingMetrics
    kv_cache: KvCacheMetrics
    speculative_decoding: SpeculativeDecodingMetrics
    first_iter: int | None
    last_iter: int | None


@dataclass(slots=True)
class PerfTrace:
    """The metrics of a request while it runs."""

    arrived_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    first_iter: int | None = None
    last_iter: int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def note_tokens(self, now_s: float) -> None:
        """Tokens were output."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def note_step(self, iteration: int) -> None:
        """The request was part of this step."""
        if self.first_iter is None:
            self.first_iter = iteration
        self.last_iter = iteration

    def metrics(self, sequences: list[Sequence]) -> RequestPerfMetrics:
        """The metrics up to now."""
        return RequestPerfMetrics(
            TimingMetrics(
                self.arrived_s, self.first_scheduled_s, self.first_token_s, self.last_token_s
            ),
            kv_cache_metrics(sequences),
            SpeculativeDecodingMetrics(self.num_draft_tokens, self.num_accepted_tokens),
            self.first_iter,
            self.last_iter,
        )
