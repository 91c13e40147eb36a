"""Opening engines on a GPU for a run: planned together, loaded, and rounds made for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import Unsupported
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.engines.device_check import require_device, require_ranks
from llmctl.runtime.engines.engine import Engine
from llmctl.runtime.engines.open_cuda import LoadedEngines, plan_engines
from llmctl.runtime.engines.opening import TARGET, Log, OpenedEngines, Opener, OpenRequest
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner


class GpuOpener(Opener):
    """See Opener for every method."""

    on_gpu = True

    def check(
        self, config: EngineConfig, num_threads: int | None, *, ranks_on_one_device: bool
    ) -> None:
        """The GPU must be there that the engine was built for."""
        if num_threads is not None:
            raise Unsupported(f"--num-threads is for cpu engines; this one is {config.backend}")
        require_ranks(config, on_one_device=ranks_on_one_device)
        require_device(config)

    def open(self, folders: Mapping[str, Path], request: OpenRequest, log: Log) -> OpenedEngines:
        """Logs the memory plan before loading, and the loading speed afterwards."""
        planned = plan_engines(
            folders,
            free_fraction=request.free_fraction,
            max_tokens=request.max_tokens,
            windows=request.windows,
            lengths=request.lengths,
            has_host_tier=request.has_host_tier,
        )
        log([f"device: {planned.device_name}", *planned.memory.lines()])
        loaded = planned.load()
        log([f"loaded {role}: {report}" for role, report in loaded.loads.items()])
        opened = OpenedOnGpu(loaded, planned.device_name)
        opened.kv_plan = planned.memory.kv_cache
        opened.window = opened.find_window(request.windows)
        return opened


class OpenedOnGpu(OpenedEngines):
    """See OpenedEngines."""

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
    ) -> CudaRoundRunner | None:
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
