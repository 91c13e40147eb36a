"""Opening engines for a run: checked first, loaded second, one memory plan for both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.engine_format import EngineConfig, read_engine_config
from llmctl.cli.speculation import Speculation
from llmctl.errors import Unsupported
from llmctl.runtime.pair import check_pair, check_target

if TYPE_CHECKING:
    from llmctl.runtime.engine import Executable
    from llmctl.runtime.executor import Executor
    from llmctl.runtime.memory import KvCachePlan
    from llmctl.runtime.speculative.drafter import Drafter


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engines, and how they share the machine."""

    engine_dir: Path
    speculation: Speculation | None = None
    free_fraction: float | None = None
    max_tokens: int | None = None
    enable_block_reuse: bool = True
    enable_chunked_context: bool = True
    max_step_ms: float | None = None
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class CheckedEngines:
    """Configurations that fit together; no weight has been read."""

    options: EngineOptions
    target: EngineConfig
    draft: EngineConfig | None
    draft_len: int


def check_engines(options: EngineOptions) -> CheckedEngines:
    """Read every config.json and check the pair. Raises EngineNotFound, CorruptEngine,
    RebuildNeeded, PairMismatch, Unsupported."""
    target = read_engine_config(options.engine_dir)
    speculation = options.speculation
    if options.num_threads is not None and target.backend != "cpu":
        raise Unsupported(f"--num-threads is for cpu engines; this one is {target.backend}")
    if speculation is None:
        return CheckedEngines(options, target, None, 0)
    if speculation.draft_engine is None:
        return CheckedEngines(options, target, None, check_target(target, speculation.draft_len))
    draft = read_engine_config(speculation.draft_engine)
    return CheckedEngines(options, target, draft, check_pair(target, draft, speculation.draft_len))


class OpenEngines:
    """Loaded engines and their common KV cache plan; makes executors."""

    def __init__(self, checked: CheckedEngines) -> None:
        from llmctl.runtime.engine import open_executable
        from llmctl.runtime.memory import DEFAULT_FREE_FRACTION, plan_kv_cache

        options = checked.options
        if options.num_threads is not None:
            from llmctl.plugins.cpu import set_num_threads

            set_num_threads(options.num_threads)
        self.checked = checked
        self.target: Executable = open_executable(options.engine_dir)
        self.draft: Executable | None = None
        if options.speculation is not None and options.speculation.draft_engine is not None:
            self.draft = open_executable(options.speculation.draft_engine)
        fraction = options.free_fraction
        self.kv_plan: KvCachePlan = plan_kv_cache(
            self.target,
            self.draft,
            free_fraction=DEFAULT_FREE_FRACTION if fraction is None else fraction,
            max_tokens=options.max_tokens,
        )

    def executor(self, *, is_speculative: bool = True) -> Executor:
        """A running executor; only one may be alive at a time, they share the engines."""
        from llmctl.plugins.cpu import CpuSampling
        from llmctl.runtime.executor import Executor, ExecutorConfig, KvCacheConfig
        from llmctl.runtime.scheduler import SchedulerConfig

        options = self.checked.options
        speculation = options.speculation if is_speculative else None
        config = ExecutorConfig(
            kv_cache=KvCacheConfig(
                num_blocks=self.kv_plan.num_blocks, enable_block_reuse=options.enable_block_reuse
            ),
            scheduler=SchedulerConfig(enable_chunked_context=options.enable_chunked_context),
            acceptance=speculation.acceptance if speculation is not None else "tokens",
            max_step_ms=options.max_step_ms,
        )
        return Executor(self.target, self._drafter(speculation), config, CpuSampling())

    def _drafter(self, speculation: Speculation | None) -> Drafter | None:
        if speculation is None:
            return None
        draft_len = self.checked.draft_len
        if self.draft is None:
            from llmctl.runtime.speculative.ngram import NgramDrafter

            return NgramDrafter(draft_len, speculation.max_ngram)
        from llmctl.runtime.speculative.draft_target import DraftTargetDrafter

        return DraftTargetDrafter(self.draft, draft_len)
