"""Configuration of an executor, checked when it is created."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from llmctl.errors import BadConfig
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types
from llmctl.runtime.api.retention import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY
from llmctl.runtime.kv_cache import AttentionWindow
from llmctl.runtime.schedule.admission import refuse_step_limit
from llmctl.runtime.schedule.scheduler import Limits, SchedulerConfig

if TYPE_CHECKING:
    from llmctl.runtime.request import Request


@refused.refuses(refused.KV_CACHE)
@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """The paged cache; `memory_plan.plan_kv_cache` computes num_blocks from a memory budget.

    Evicted blocks whose priority is at least `secondary_offload_min_priority` move to
    `num_host_blocks` slots in host memory and are copied back when they are reused.
    """

    num_blocks: int
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    num_host_blocks: int = 0
    secondary_offload_min_priority: int = DEFAULT_PRIORITY
    event_buffer_max_size: int = 0  # events kept for a reader; 0: no events
    window: AttentionWindow | None = None  # common to all layers of all engines: `common_window`

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_blocks < 1:
            raise BadConfig(f"num_blocks is {self.num_blocks}; it must be at least 1")
        for name in ("num_host_blocks", "event_buffer_max_size"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not MIN_PRIORITY <= self.secondary_offload_min_priority <= MAX_PRIORITY:
            raise BadConfig(
                f"secondary_offload_min_priority is {self.secondary_offload_min_priority}; it must "
                f"be from {MIN_PRIORITY} to {MAX_PRIORITY}"
            )
        if self.num_host_blocks and not self.enable_block_reuse:
            raise BadConfig(
                "host memory keeps blocks for reuse, and enable_block_reuse is off",
                fix="leave --kv-cache-host-memory-bytes out, or turn block reuse on",
            )


@refused.refuses(refused.EXECUTOR)
@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Everything except the engines. With a history of 0 iterations none is kept."""

    kv_cache: KvCacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    acceptance: Literal["tokens", "logits"] = "tokens"  # rule for sampled requests with a draft
    # Choose draft lengths by measured cost, at most max_draft_len; None: if the host controls every
    # step.
    adaptive_draft_len: bool | None = False
    # Context chunks shrink to keep steps within this time, or ("auto") as far as throughput allows.
    max_step_ms: float | Literal["auto"] | None = None
    max_batch_size: int | None = None  # sequences per step; None: the engine's limit
    max_num_tokens: int | None = None  # packed tokens per step; None: the engine's limit
    max_queue_size: int | None = None  # requests that have not started; None: no limit
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    check_invariants: bool = False  # recount the KV cache whenever idle (for tests)

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_queue_size", "max_batch_size", "max_num_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadConfig(f"{name} is {value}; it must be at least 1")
        if self.max_step_ms is not None:
            refuse_step_limit(self.max_step_ms, is_chunked=self.scheduler.enable_chunked_context)
        for name in ("iter_stats_max_iterations", "request_stats_max_iterations"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 0")

    def check_acceptance(self, request: Request) -> None:
        """Raise BadConfig for a request with another lossy rule than this one."""
        if self.acceptance != "tokens" and request.sampling_config.accepts_typical:
            raise BadConfig(
                f"the request has typical acceptance, and drafts are accepted by {self.acceptance}",
                fix="choose one of the two: leave typical_acceptance out, or use_logits False",
            )

    def limits(self, engine: Limits) -> Limits:
        """The engine's limits, or the smaller ones asked for. Raises BadConfig for larger ones."""
        for name in ("max_batch_size", "max_num_tokens"):
            asked, most = getattr(self, name), getattr(engine, name)
            if asked is not None and asked > most:
                raise BadConfig(
                    f"{name} is {asked}; the engine was built for {most}",
                    fix=f"rebuild the engine with a larger --{name}, or request less",
                )
        return replace(
            engine,
            max_batch_size=self.max_batch_size or engine.max_batch_size,
            max_num_tokens=self.max_num_tokens or engine.max_num_tokens,
        )
