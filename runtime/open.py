"""From options to a ready executor: engines checked first, loaded second, one memory plan for all.

    engines = OpenEngines(check_engines(EngineOptions(target_dir, method)))
    with engines.executor() as executor: ...

The command line, the benchmarks and `llmctl.open` are thin callers of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from llmctl.builder.engine_format import EngineConfig, read_engine_config, require_rank_files
from llmctl.builder.signature import require_signed
from llmctl.builder.signing_keys import PublicKey
from llmctl.errors import BadConfig
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.runtime.api.refused import require_known
from llmctl.runtime.drafting.length.lengths import round_lengths
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.methods import as_method
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engine_options import EngineOptions as EngineOptions
from llmctl.runtime.engines.opening import TARGET, Log, OpenRequest, opener_of
from llmctl.runtime.kv_cache.attention_windows import what_windows_save
from llmctl.runtime.ranks.launch import require_drafts, require_world
from llmctl.runtime.ranks.serve import serve_rank
from llmctl.runtime.schedule.admission import SchedulerConfig

if TYPE_CHECKING:
    from llmctl.runtime.api.executor import Executor
    from llmctl.runtime.drafting.drafter import Drafter
    from llmctl.runtime.engines.weights_ahead import WeightsAhead
    from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance


@dataclass(frozen=True, slots=True)
class CheckedEngines:
    """Configurations that fit together, by role. On a GPU the target's weights are being read."""

    options: EngineOptions
    configs: Mapping[str, EngineConfig]
    draft_len: int  # the most drafts per round
    ahead: WeightsAhead | None = None  # the first engines opened take it

    @property
    def target(self) -> EngineConfig:
        """Of the engine whose text is generated."""
        return self.configs[TARGET]

    @property
    def num_gpus(self) -> int:
        """GPUs that the engines run on; 0: a CPU."""
        if not opener_of(self.target.backend).on_gpu:
            return 0
        return 1 if self.options.ranks_on_one_device else self.target.num_ranks


def check_engines(options: EngineOptions, *, reads_ahead: bool = True) -> CheckedEngines:
    """Read every config.json and check that the engines fit together, and this machine.

    reads_ahead: on a GPU begin to read the target's weights, since `OpenEngines` is next; torch,
    which is imported meanwhile, takes longer than that.

    Raises EngineNotFound, CorruptEngine, RebuildNeeded, PairMismatch, Unsupported, and BadConfig
    where other ranks were started than the engine has; of a GPU's engines also NoDevice where there
    is none. OutOfMemory where host memory for blocks is not there. With a trusted builder also
    BadKey, MissingPackage and UntrustedEngine.
    """
    if options.trusted_builder is not None:
        builder = PublicKey.read(Path(options.trusted_builder))
        for folder in options.folders.values():
            require_signed(folder, builder)
    configs = {role: read_engine_config(folder) for role, folder in options.folders.items()}
    target = configs[TARGET]
    ahead = None
    is_alone = target.num_ranks == 1  # several ranks have a device each
    if reads_ahead and is_alone and BACKENDS[target.backend].on_gpu:
        from llmctl.runtime.engines.weights_ahead import WeightsAhead

        ahead = WeightsAhead.begin(options.engine_dir)
    require_world(target, options.tp_size, waits=options.rank_timeout_s is not None)
    require_drafts(configs)
    draft_len = options.method.check(target, configs)
    opener_of(target.backend).check(
        target,
        options.num_threads,
        ranks_on_one_device=options.ranks_on_one_device,
        has_host_tier=options.host_memory_bytes is not None,
    )
    if options.host_memory_bytes is not None:
        from llmctl.runtime.engines.memory_plan import require_host_memory

        require_host_memory(options.host_memory_bytes)
    for role, config in configs.items():
        require_rank_files(options.folders[role], config.num_ranks)
    return CheckedEngines(options, configs, draft_len, ahead)


class OpenEngines:
    """Loaded engines and their common KV cache plan; makes executors.

    `log` receives progress lines while loading: on a GPU the memory plan, then the loading speed.
    """

    def __init__(self, checked: CheckedEngines, log: Log = lambda lines: None) -> None:
        options = checked.options
        self.checked = checked
        if options.method.notes:
            log(list(options.method.notes))
        request = OpenRequest(
            draft_len=checked.draft_len,
            lengths=self._lengths(options.method, checked.draft_len),
            free_fraction=options.free_fraction,
            max_tokens=options.max_tokens,
            host_memory_bytes=options.host_memory_bytes,
            num_threads=options.num_threads,
            windows=options.windows,
            rank_timeout_s=options.rank_waits_s,
            ranks_on_one_device=options.ranks_on_one_device,
            ahead=checked.ahead,
        )
        self.opened = opener_of(checked.target.backend).open(options.folders, request, log)
        # Of the last executor. Not itself: it may own these engines, and memory would stay until a
        # collection of garbage.
        self._worker: Thread | None = None
        self.target = self.opened.target
        self.kv_plan = self.opened.kv_plan
        note = what_windows_save(self.opened.plans, self.opened.window)
        if note is not None:
            log([note])

    def close(self) -> None:
        """End the processes of other ranks, after every executor. Also happens at exit."""
        self.opened.close()

    def executor(
        self,
        *,
        is_speculative: bool = True,
        method: DraftMethod | None = None,
        draft_len: int | None = None,
        acceptance: SyntheticAcceptance | None = None,
        num_iterations_kept: int = 1000,
        owns_engines: bool = False,
    ) -> Executor:
        """A running executor. Only one may run at a time, because they share the engines: raises
        BadConfig if there is another.

        method: another than that of the checked options, over the same engines.
        draft_len: drafts per round, if different from the checked options; at most what the target
        verifies. acceptance: accept drafts at random, for benchmarks. owns_engines: they are closed
        when it is shut down.
        """
        from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
        from llmctl.runtime.engines.memory_plan import host_blocks

        if self._worker is not None and self._worker.is_alive():
            raise BadConfig(
                "an executor runs on these engines, and they hold the steps of one",
                fix="shut it down first, or open the engines once more",
            )
        options = self.checked.options
        method = method or (options.method if is_speculative else PlainDecoding())
        made = method if draft_len is None else method.with_draft_len(draft_len)
        adapts: bool | None = options.adaptive_draft_len and method.is_drafting
        if not adapts and not made.has_lengths and acceptance is None:
            adapts = None  # if the host controls every step
        config = ExecutorConfig(
            kv_cache=KvCacheConfig(
                num_blocks=self.kv_plan.num_blocks,
                enable_block_reuse=options.enable_block_reuse,
                num_host_blocks=host_blocks(self.kv_plan, options.host_memory_bytes),
                window=self.opened.window,
            ),
            scheduler=SchedulerConfig(
                options.scheduler_policy,
                options.context_chunking_policy,
                options.enable_chunked_context,
            ),
            acceptance=method.acceptance,
            adaptive_draft_len=adapts,
            max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens,
            max_step_ms=options.max_step_ms,
            iter_stats_max_iterations=num_iterations_kept,
        )
        count = self.checked.draft_len if draft_len is None else draft_len
        lengths = self._lengths(method, count)
        if method != options.method:  # memory was planned for other options
            lengths = ()
        drafter = made.make_drafter(self.opened.engines, count)
        executor = Executor(
            self.target,
            _forced(drafter, acceptance),
            config,
            self.opened.sampling,
            self.opened.make_round_runner(method, drafter, count, acceptance, lengths),
            self.close if owns_engines else lambda: None,
        )
        self._worker = executor.thread
        return executor

    def _lengths(self, method: DraftMethod, draft_len: int) -> tuple[int, ...]:
        """What rounds on a device draft, where their graphs are to be there from the start: 0
        without drafts, and whatever may come where lengths adapt."""
        if not method.is_drafting:
            return (0,)
        if not self.checked.options.adaptive_draft_len or not method.is_device_led:
            return ()
        return tuple(round_lengths(draft_len))


def open_executor(
    engine: Path | str,
    draft: DraftMethod | Path | str | None = None,
    *,
    draft_tree: str | None = None,
    log: Log = lambda lines: None,
    **options: Any,
) -> Executor:
    """Open an engine directory, and what drafts for it: an engine directory, or any DraftMethod.
    draft_tree: "depth,branch,nodes" of a draft engine; None: chains.

    Further options are the fields of EngineOptions. Raises what `check_engines` raises, BadConfig
    (also for an option that there is none of), OutOfMemory and DeviceFailure.
    """
    known = {field.name for field in fields(EngineOptions)} - {"engine_dir", "method"}
    require_known("llmctl.open", options, known | {"engine", "draft", "draft_tree"})
    folder = cast("Path", engine)  # EngineOptions makes a path of a name, and refuses what is none
    chosen = EngineOptions(folder, as_method(draft, draft_tree), **options)
    code = serve_rank(chosen)
    if code is not None:  # a launcher started this process beside rank 0
        raise SystemExit(code)
    checked = check_engines(chosen)
    return OpenEngines(checked, log).executor(owns_engines=True)


def _forced(drafter: Drafter, acceptance: SyntheticAcceptance | None) -> Drafter:
    """The drafter, with its drafts accepted at random if asked for."""
    if acceptance is None:
        return drafter
    from llmctl.runtime.generate.synthetic_acceptance import SyntheticDrafter

    return SyntheticDrafter(drafter, acceptance)
