"""Opening engines on the CPU: weights stay mapped, the KV caches share what memory is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmctl.builder.engine_format import EngineConfig, read_engine_config
from llmctl.errors import Unsupported
from llmctl.plugins.backends.cpu import CpuSampling, num_threads, set_num_threads
from llmctl.plugins.backends.cpu.ranks import Ranks
from llmctl.plugins.backends.host_cores import usable_cores
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.engines.engine import Engine, open_cpu_engine
from llmctl.runtime.engines.leading_engine import LeadingEngine
from llmctl.runtime.engines.memory_plan import DEFAULT_FREE_FRACTION, plan_kv_cache
from llmctl.runtime.engines.opening import (
    TARGET,
    Log,
    OpenedEngines,
    Opener,
    OpenRequest,
    RankSide,
)
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
from llmctl.runtime.kv_cache import most_step_tokens
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks.launch import shared_folders, world_of
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.ranks.processes import RankOptions


class CpuOpener(Opener):
    """See Opener for every method."""

    on_gpu = False

    def check(
        self,
        config: EngineConfig,
        num_threads: int | None,
        *,
        ranks_on_one_device: bool,
        has_host_tier: bool = False,
    ) -> None:
        """Every machine has a CPU, and host memory."""
        if ranks_on_one_device:
            raise Unsupported(
                f"--ranks-on-one-device is for cuda engines; this one is {config.backend}, whose "
                "ranks are processes",
                fix="leave it out",
            )

    def open(self, folders: Mapping[str, Path], request: OpenRequest, log: Log) -> OpenedEngines:
        """Logs nothing: opening takes no time."""
        configs = {role: read_engine_config(folder) for role, folder in folders.items()}
        size = configs[TARGET].num_ranks
        if size == 1:
            if request.num_threads is not None:
                set_num_threads(request.num_threads)
            engines = {
                role: open_cpu_engine(folder, request.windows) for role, folder in folders.items()
            }
            return OpenedOnCpu(engines, request)
        num_threads = request.num_threads or max(1, usable_cores() // size)
        shared = shared_folders(configs, folders)
        options = RankOptions(
            size, shared, request.windows, num_threads, limit_s=request.rank_timeout_s
        )
        leader = Leader(options, world_of(configs[TARGET]))
        set_num_threads(num_threads)
        engines = {
            role: LeadingEngine(
                open_cpu_engine(folder, request.windows, leader.ranks), leader, role
            )
            if role in shared
            else open_cpu_engine(folder, request.windows)
            for role, folder in folders.items()
        }
        leader.wait_for_all("opened its engines", is_starting=True)
        return OpenedOnCpu(engines, request, leader)

    def rank_side(self, rank: int, size: int, folders: Mapping[str, Path]) -> CpuRank:
        """See CpuRank."""
        return CpuRank()


class CpuRank(RankSide):
    """Its engines."""

    said: Mapping[str, Any] = {}

    def open(
        self,
        folders: Mapping[str, Path],
        windows: WindowOptions,
        ranks: Ranks,
        said: Sequence[Mapping[str, Any]],
    ) -> dict[str, Engine]:
        """Their kernels exchange sums through what all ranks share."""
        return {role: open_cpu_engine(folder, windows, ranks) for role, folder in folders.items()}


class OpenedOnCpu(OpenedEngines):
    """See OpenedEngines."""

    has_one_memory = True

    def __init__(
        self, engines: Mapping[str, Engine], request: OpenRequest, leader: Leader | None = None
    ) -> None:
        self.engines = engines
        self._leader = leader
        self.sampling = CpuSampling()
        self.window = self.find_window(request.windows)
        fraction = request.free_fraction
        self.kv_plan = plan_kv_cache(
            list(engines.values()),
            free_fraction=DEFAULT_FREE_FRACTION if fraction is None else fraction,
            max_tokens=request.max_tokens,
            window=self.window,
            max_step_tokens=most_step_tokens(self.target.max_num_tokens, request.draft_len),
        )

    def close(self) -> None:
        """End the other ranks."""
        if self._leader is not None:
            self._leader.close()

    def facts(self, engine: Engine) -> str:
        """The backend, and the threads it uses."""
        size = engine.config.num_ranks
        alone = " in rank 0 alone" if self._leader is not None else ""
        ranks = f" on each of {size} ranks" if size > 1 else alone
        threads = "1 thread" if num_threads() == 1 else f"{num_threads()} threads"
        return f"backend {engine.config.backend} with {threads}{ranks}"

    def make_round_runner(
        self,
        method: DraftMethod,
        drafter: Drafter,
        draft_len: int,
        acceptance: SyntheticAcceptance | None,
        lengths: tuple[int, ...],
    ) -> None:
        """None: on a CPU the host is the device."""
        return None
