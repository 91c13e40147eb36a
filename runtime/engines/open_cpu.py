"""Opening engines on the CPU: weights stay mapped, the KV caches share what memory is free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmctl.builder.engine_format import EngineConfig
from llmctl.plugins.backends.cpu import CpuSampling, num_threads, set_num_threads
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.engines.engine import Engine, open_cpu_engine
from llmctl.runtime.engines.memory_plan import DEFAULT_FREE_FRACTION, plan_kv_cache
from llmctl.runtime.engines.opening import Log, OpenedEngines, Opener, OpenRequest
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
from llmctl.runtime.kv_cache import most_step_tokens


class CpuOpener(Opener):
    """See Opener for every method."""

    on_gpu = False

    def check(self, config: EngineConfig, num_threads: int | None) -> None:
        """Every machine has a CPU."""

    def open(self, folders: Mapping[str, Path], request: OpenRequest, log: Log) -> OpenedEngines:
        """Logs nothing: opening takes no time."""
        if request.num_threads is not None:
            set_num_threads(request.num_threads)
        engines = {
            role: open_cpu_engine(folder, request.windows) for role, folder in folders.items()
        }
        return OpenedOnCpu(engines, request)


class OpenedOnCpu(OpenedEngines):
    """See OpenedEngines."""

    def __init__(self, engines: Mapping[str, Engine], request: OpenRequest) -> None:
        self.engines = engines
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

    def facts(self, engine: Engine) -> str:
        """The backend, and the threads it uses."""
        return f"backend {engine.config.backend} with {num_threads()} threads"

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
