"""Opening engines for a run: checked first, loaded second, one memory plan for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmctl.builder.engine_format import EngineConfig, Plan, read_engine_config
from llmctl.cli.run.speculation import Speculation
from llmctl.errors import Unsupported
from llmctl.runtime.drafting.length.lengths import round_lengths
from llmctl.runtime.engines.pair_check import check_pair, check_target
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, cache_window, what_windows_save
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy, SchedulerConfig
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy

if TYPE_CHECKING:
    from llmctl.plugins.ops.sampling.spec import SamplingBackend
    from llmctl.runtime.api.executor import Executor
    from llmctl.runtime.drafting.drafter import Drafter
    from llmctl.runtime.engines.engine import Engine
    from llmctl.runtime.engines.memory_plan import KvCachePlan
    from llmctl.runtime.engines.open_cuda import OpenedPair
    from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
    from llmctl.runtime.kv_cache import AttentionWindow
    from llmctl.runtime.rounds.rounds import RoundRunner


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engines, and how they share the machine."""

    engine_dir: Path
    speculation: Speculation | None = None
    adaptive_draft_len: bool = False
    free_fraction: float | None = None
    max_tokens: int | None = None
    host_memory_bytes: int | None = None
    enable_block_reuse: bool = True
    enable_chunked_context: bool = True
    scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    max_batch_size: int | None = None  # no more than the engine's
    max_num_tokens: int | None = None
    max_step_ms: float | Literal["auto"] | None = None
    num_threads: int | None = None
    windows: WindowOptions = WindowOptions()


@dataclass(frozen=True, slots=True)
class CheckedEngines:
    """Configurations that fit together; no weight has been read."""

    options: EngineOptions
    target: EngineConfig
    draft: EngineConfig | None
    draft_len: int


def check_engines(options: EngineOptions) -> CheckedEngines:
    """Read every config.json and check the pair. Raises EngineNotFound, CorruptEngine,
    RebuildNeeded, PairMismatch, Unsupported; of a GPU's engines also NoDevice where there is none.
    """
    target = read_engine_config(options.engine_dir)
    speculation = options.speculation
    if options.num_threads is not None and target.backend != "cpu":
        raise Unsupported(f"--num-threads is for cpu engines; this one is {target.backend}")
    draft, draft_len = None, 0
    if speculation is not None and speculation.draft_engine is not None:
        draft = read_engine_config(speculation.draft_engine)
        draft_len = check_pair(target, draft, speculation.draft_len)
    elif speculation is not None:
        draft_len = check_target(target, speculation.draft_len)
    if target.backend != "cpu":
        from llmctl.runtime.engines.device_check import require_device

        require_device(target)
    return CheckedEngines(options, target, draft, draft_len)


class OpenEngines:
    """Loaded engines and their common KV cache plan; makes executors.

    `log` gets lines for people while loading: on a GPU the memory plan, then the loading speed.
    """

    def __init__(
        self, checked: CheckedEngines, log: Callable[[list[str]], None] = lambda lines: None
    ) -> None:
        options = checked.options
        speculation = options.speculation
        self.checked = checked
        self.target: Engine
        self.draft: Engine | None = None
        self.kv_plan: KvCachePlan
        self.device_name: str | None = None  # of a GPU
        self._on_device: OpenedPair | None = None
        draft_dir = speculation.draft_engine if speculation is not None else None
        if checked.target.backend != "cpu":
            self._open_on_device(options, draft_dir, log)
        else:
            self._open_on_cpu(options, draft_dir)
        note = what_windows_save(self._plans(), self._window())
        if note is not None:
            log([note])

    def _open_on_cpu(self, options: EngineOptions, draft_dir: Path | None) -> None:
        from llmctl.runtime.engines.engine import open_cpu_engine
        from llmctl.runtime.engines.memory_plan import DEFAULT_FREE_FRACTION, plan_kv_cache
        from llmctl.runtime.kv_cache import most_step_tokens

        if options.num_threads is not None:
            from llmctl.plugins.backends.cpu import set_num_threads

            set_num_threads(options.num_threads)
        self.target = open_cpu_engine(options.engine_dir, options.windows)
        if draft_dir is not None:
            self.draft = open_cpu_engine(draft_dir, options.windows)
        fraction = options.free_fraction
        self.kv_plan = plan_kv_cache(
            self.target,
            self.draft,
            free_fraction=DEFAULT_FREE_FRACTION if fraction is None else fraction,
            max_tokens=options.max_tokens,
            window=self._window(),
            max_step_tokens=most_step_tokens(self.target.max_num_tokens, self.checked.draft_len),
        )

    def _open_on_device(
        self, options: EngineOptions, draft_dir: Path | None, log: Callable[[list[str]], None]
    ) -> None:
        from llmctl.runtime.engines.open_cuda import plan_pair

        planned = plan_pair(
            options.engine_dir,
            draft_dir,
            free_fraction=options.free_fraction,
            max_tokens=options.max_tokens,
            windows=options.windows,
            lengths=self._lengths(self.checked.draft_len),
            has_host_tier=options.host_memory_bytes is not None,
        )
        self.device_name = planned.device_name
        log([f"device: {planned.device_name}", *planned.memory.lines()])
        opened = planned.load()
        log([f"loaded {role}: {report}" for role, report in opened.loads])
        self.target, self.draft = opened.target, opened.draft
        self.kv_plan = planned.memory.kv_cache
        self._on_device = opened

    def executor(
        self,
        *,
        is_speculative: bool = True,
        draft_len: int | None = None,
        acceptance: SyntheticAcceptance | None = None,
        num_iterations_kept: int = 1000,
    ) -> Executor:
        """A running executor; only one may be alive at a time, they share the engines.

        draft_len: drafts a round, if not the ones checked; no more than the target verifies.
        acceptance: drafts stand by lot; for benchmarks.
        """
        from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
        from llmctl.runtime.engines.memory_plan import host_blocks

        options = self.checked.options
        speculation = options.speculation if is_speculative else None
        config = ExecutorConfig(
            kv_cache=KvCacheConfig(
                num_blocks=self.kv_plan.num_blocks,
                enable_block_reuse=options.enable_block_reuse,
                num_host_blocks=host_blocks(self.kv_plan, options.host_memory_bytes),
                window=self._window(),
            ),
            scheduler=SchedulerConfig(
                options.scheduler_policy,
                options.context_chunking_policy,
                options.enable_chunked_context,
            ),
            acceptance=speculation.acceptance if speculation is not None else "tokens",
            adaptive_draft_len=options.adaptive_draft_len and speculation is not None,
            max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens,
            max_step_ms=options.max_step_ms,
            iter_stats_max_iterations=num_iterations_kept,
        )
        count = self.checked.draft_len if draft_len is None else draft_len
        return Executor(
            self.target,
            self._drafter(speculation, count, acceptance),
            config,
            self._sampling(),
            self._round_runner(speculation, count, acceptance),
        )

    def _window(self) -> AttentionWindow | None:
        """What no layer of either engine sees any more may leave the cache."""
        return cache_window(self._plans(), self.checked.options.windows, self.target.max_seq_len)

    def _plans(self) -> list[Plan]:
        return [engine.plan for engine in (self.target, self.draft) if engine is not None]

    def _sampling(self) -> SamplingBackend:
        """The sampling of the engines' backend."""
        if self._on_device is not None:
            return self._on_device.sampling
        from llmctl.plugins.backends.cpu import CpuSampling

        return CpuSampling()

    def _round_runner(
        self,
        speculation: Speculation | None,
        draft_len: int,
        acceptance: SyntheticAcceptance | None,
    ) -> RoundRunner | None:
        """What runs generation on the device by itself: plain decoding and draft engines whose
        drafts are accepted by tokens. Everything else is led by the host."""
        opened = self._on_device
        if opened is None or not opened.has_rounds:
            return None
        from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner

        if speculation is None:
            is_plain = (
                self.checked.options.speculation is None
            )  # else not what memory is planned for
            return CudaRoundRunner(opened.target, None, 0, lengths=[0] if is_plain else [])
        if opened.draft is None or speculation.acceptance != "tokens":
            return None
        return CudaRoundRunner(
            opened.target,
            opened.draft,
            draft_len,
            acceptance=acceptance,
            lengths=self._lengths(draft_len),
        )

    def _lengths(self, draft_len: int) -> list[int]:
        """What rounds on the device draft, where their graphs are to be there from the start: 0
        without drafts, and whatever may come where lengths adapt."""
        options = self.checked.options
        speculation = options.speculation
        if speculation is None:
            return [0]
        if not options.adaptive_draft_len:
            return []
        if speculation.draft_engine is None or speculation.acceptance != "tokens":
            return []
        return round_lengths(draft_len)

    def _drafter(
        self,
        speculation: Speculation | None,
        draft_len: int,
        acceptance: SyntheticAcceptance | None,
    ) -> Drafter | None:
        if speculation is None:
            return None
        drafter: Drafter
        if self.draft is None:
            from llmctl.runtime.drafting.ngram.drafter import NgramDrafter

            drafter = NgramDrafter(draft_len, speculation.max_ngram)
        else:
            from llmctl.runtime.drafting.draft_engine.drafter import DraftTargetDrafter

            drafter = DraftTargetDrafter(self.draft, draft_len)
        if acceptance is None:
            return drafter
        from llmctl.runtime.generate.synthetic_acceptance import SyntheticDrafter

        return SyntheticDrafter(drafter, acceptance)
