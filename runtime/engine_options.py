"""Options with which engines are opened: which engines, and how they use the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmctl.errors import BadConfig
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engines.opening import TARGET
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.schedule import admission
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy

RANK_WAITS_S = 30.0


@refused.refuses()
@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engines to open, and how they use the machine."""

    engine_dir: Path
    method: DraftMethod = PlainDecoding()
    adaptive_draft_len: bool = False
    free_fraction: float | None = None
    max_tokens: int | None = None
    host_memory_bytes: int | None = None
    enable_block_reuse: bool = True
    enable_chunked_context: bool = True
    scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    max_batch_size: int | None = None  # at most the engine's
    max_num_tokens: int | None = None
    max_step_ms: float | Literal["auto"] | None = None
    num_threads: int | None = None
    trusted_builder: Path | str | None = None  # public key that must have signed every engine
    windows: WindowOptions = WindowOptions()
    tp_size: int | None = None  # ranks; None: as many as the engine has
    rank_timeout_s: float | None = None  # how long one rank waits for another; None: RANK_WAITS_S
    ranks_on_one_device: bool = False  # of a GPU, in this process: for tests

    def __post_init__(self) -> None:
        check_types(self)
        if self.free_fraction is not None and not 0 < self.free_fraction < 1:  # also NaN
            raise BadConfig(
                f"free_fraction is {self.free_fraction}; it must be in (0, 1)",
                fix="leave --kv-cache-free-gpu-memory-fraction out for the usual share",
            )
        for name in ("host_memory_bytes", "max_batch_size", "max_num_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadConfig(
                    f"{name} is {value}; it must be at least 1", fix=f"leave {name} out, or None"
                )
        if not 0 < self.rank_waits_s < 1e6:  # also NaN
            raise BadConfig(
                f"--rank-timeout is {self.rank_timeout_s}; it must be more than 0 s and less than "
                "1e6 s"
            )
        if self.adaptive_draft_len and not self.method.is_drafting:
            raise BadConfig(
                "adaptive_draft_len is set without a draft",
                fix="leave it out, or give a draft method",
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadConfig(
                f"max_tokens of the KV cache is {self.max_tokens}; at least 1 is wanted"
            )
        if self.max_step_ms is not None:
            admission.refuse_step_limit(self.max_step_ms, is_chunked=self.enable_chunked_context)
        if self.host_memory_bytes is not None and not self.enable_block_reuse:
            raise BadConfig(
                "--kv-cache-host-memory-bytes keeps blocks for reuse, and block reuse is off",
                fix="leave it out, or turn block reuse on",
            )

    @property
    def rank_waits_s(self) -> float:
        """How long one rank waits for another before it is given up."""
        return RANK_WAITS_S if self.rank_timeout_s is None else self.rank_timeout_s

    @property
    def folders(self) -> dict[str, Path]:
        """Engine directories by role, the target first."""
        return {TARGET: self.engine_dir, **self.method.engines}
