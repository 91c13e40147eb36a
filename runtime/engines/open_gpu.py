"""Opening engines on a GPU for a run: planned together, loaded, and rounds made for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmctl.builder.engine_format import EngineConfig, read_engine_config
from llmctl.errors import Unsupported
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.engines.device_check import require_device, require_ranks
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.engines.memory_plan import host_blocks
from llmctl.runtime.engines.open_cuda import LoadedEngines, plan_engines
from llmctl.runtime.engines.open_peers import GpuRank, lead
from llmctl.runtime.engines.opening import (
    TARGET,
    Log,
    OpenedEngines,
    Opener,
    OpenRequest,
    RankSide,
)
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.following import LeadingRounds
from llmctl.runtime.rounds.rounds import RoundRunner


class GpuOpener(Opener):
    """See Opener for every method."""

    on_gpu = True

    def check(
        self,
        config: EngineConfig,
        num_threads: int | None,
        *,
        ranks_on_one_device: bool,
        has_host_tier: bool = False,
    ) -> None:
        """The GPU must be there that the engine was built for, and of ranks every one's."""
        if num_threads is not None:
            raise Unsupported(f"--num-threads is for cpu engines; this one is {config.backend}")
        if has_host_tier:
            _refuse_host_tier(config, is_apart=not ranks_on_one_device)
        require_ranks(config, on_one_device=ranks_on_one_device)
        if config.num_ranks == 1 or ranks_on_one_device:
            require_device(config)
            return
        for rank in range(config.num_ranks):
            require_device(config, rank)

    def open(self, folders: Mapping[str, Path], request: OpenRequest, log: Log) -> OpenedEngines:
        """Logs the memory plan before loading, and the loading speed afterwards."""
        ranks = read_engine_config(folders[TARGET]).num_ranks
        rank = None if ranks == 1 or request.ranks_on_one_device else 0
        planned = plan_engines(
            folders,
            free_fraction=request.free_fraction,
            max_tokens=request.max_tokens,
            windows=request.windows,
            lengths=request.lengths,
            has_host_tier=request.host_memory_bytes is not None,
            rank=rank,
            ahead=request.ahead,
        )
        log([f"device: {planned.device_name}", *planned.memory.lines()])
        host_blocks(planned.memory.kv_cache, request.host_memory_bytes)  # before weights are loaded
        if rank is None:
            loaded = planned.load()
            opened = OpenedOnGpu(loaded, planned.device_name)
        else:
            loaded, leader = lead(folders, planned, request)
            opened = OpenedOnGpus(loaded, planned.device_name, leader)
        log([f"loaded {role}: {report}" for role, report in loaded.loads.items()])
        opened.kv_plan = planned.memory.kv_cache
        opened.window = opened.find_window(request.windows)
        return opened

    def rank_side(self, rank: int, size: int, folders: Mapping[str, Path]) -> RankSide:
        """See GpuRank."""
        return GpuRank(rank, size, folders)


def _refuse_host_tier(config: EngineConfig, *, is_apart: bool) -> None:
    """Where blocks cannot leave the GPU. is_apart: each rank has a GPU of its own."""
    from llmctl.runtime.engines.open_tensorrt import is_linear

    if is_linear(config):
        raise Unsupported(
            "--kv-cache-host-memory-bytes is refused: the engine's KV cache is continuous, and has "
            "no blocks",
            fix="leave it out, or build with --kv_cache_type paged",
        )
    if is_apart and config.num_ranks > 1:
        raise Unsupported(
            "--kv-cache-host-memory-bytes is refused: blocks of several ranks stay on their GPUs",
            fix="leave it out",
        )


class OpenedOnGpu(OpenedEngines):
    """See OpenedEngines."""

    engines: Mapping[str, Engine]

    def __init__(self, loaded: LoadedEngines, device_name: str) -> None:
        self.engines = loaded.engines
        self.sampling = loaded.sampling
        self.device_name = device_name
        self._loaded = loaded

    def close(self) -> None:
        """There is no other process."""

    def facts(self, engine: Engine) -> str:
        """The backend, and how many ranks share the device."""
        ranks = engine.config.num_ranks
        return f"backend {engine.config.backend}" + f", {ranks} ranks on one device" * (ranks > 1)

    def make_round_runner(
        self,
        method: DraftMethod,
        drafter: Drafter,
        draft_len: int,
        acceptance: SyntheticAcceptance | None,
        lengths: tuple[int, ...],
    ) -> RoundRunner | None:
        """Device rounds, if the method can draft on the device. There, trees are not accepted at
        random."""
        loaded = self._loaded
        is_forced_tree = acceptance is not None and method.drafts_trees
        if not loaded.has_rounds or not method.is_device_led or is_forced_tree:
            return None
        on_device = method.make_device_drafter(loaded.engines, draft_len, drafter)
        if on_device is None:
            return None
        return CudaRoundRunner(
            loaded.engines[TARGET], on_device, acceptance=acceptance, lengths=lengths
        )


class OpenedOnGpus(OpenedOnGpu):
    """Of several ranks with a GPU each, of which rank 0 leads."""

    def __init__(self, loaded: LoadedEngines, device_name: str, leader: Leader) -> None:
        super().__init__(loaded, device_name)
        self._leader = leader

    def close(self) -> None:
        """End the other ranks."""
        self._leader.close()

    def facts(self, engine: Engine) -> str:
        """The backend, and how many ranks have a GPU each."""
        ranks = engine.config.num_ranks
        where = f"{ranks} ranks, each on a GPU" if ranks > 1 else "on each rank's GPU"
        return f"backend {engine.config.backend}, {where}"

    def make_round_runner(
        self,
        method: DraftMethod,
        drafter: Drafter,
        draft_len: int,
        acceptance: SyntheticAcceptance | None,
        lengths: tuple[int, ...],
    ) -> RoundRunner | None:
        """Rounds on all devices alike, of what other ranks can draft, too; drafts are not accepted
        at random there."""
        if acceptance is not None:
            return None
        runner = super().make_round_runner(method, drafter, draft_len, acceptance, lengths)
        followed = runner.drafter.followed() if runner is not None else None
        if runner is None or followed is None:
            return None
        return LeadingRounds(self._leader, runner, followed, lengths)
