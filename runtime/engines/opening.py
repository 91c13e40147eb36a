"""Opening engines by backend: the interface that each backend implements.

Callers use nothing else of a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.plugins.backends.backend import BACKENDS
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, cache_window

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig, Plan
    from llmctl.plugins.backends.cpu.ranks import Ranks
    from llmctl.plugins.ops.sampling.spec import SamplingBackend
    from llmctl.runtime.drafting.drafter import Drafter
    from llmctl.runtime.drafting.method import DraftMethod
    from llmctl.runtime.engines.engine import Engine
    from llmctl.runtime.engines.memory_plan import KvCachePlan
    from llmctl.runtime.engines.weights_ahead import WeightsAhead
    from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance
    from llmctl.runtime.kv_cache import AttentionWindow
    from llmctl.runtime.rounds.rounds import RoundRunner

TARGET = "target"  # the role of the engine whose text is generated
Log = Callable[[list[str]], None]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What opening engines needs to know besides their folders."""

    draft_len: int
    lengths: tuple[int, ...]  # draft lengths whose CUDA graphs are there before the first request
    free_fraction: float | None
    max_tokens: int | None
    host_memory_bytes: int | None
    num_threads: int | None
    windows: WindowOptions
    rank_timeout_s: float  # how long one rank waits for another
    ranks_on_one_device: bool  # of a GPU
    ahead: WeightsAhead | None  # of the target, on a GPU


class OpenedEngines(ABC):
    """Loaded engines by role, with the KV caches planned for all of them together."""

    engines: Mapping[str, Engine]
    kv_plan: KvCachePlan
    sampling: SamplingBackend
    device_name: str | None = None  # of a GPU
    has_one_memory: bool = False  # which all ranks read; else each has its own
    window: AttentionWindow | None  # what no layer of any engine sees any more may be dropped

    @property
    def target(self) -> Engine:
        """The engine whose text is generated."""
        return self.engines[TARGET]

    @property
    def draft_engines(self) -> list[Engine]:
        """The engines that draft."""
        return [engine for role, engine in self.engines.items() if role != TARGET]

    @property
    def plans(self) -> list[Plan]:
        """Of all engines."""
        return [engine.plan for engine in self.engines.values()]

    def find_window(self, windows: WindowOptions) -> AttentionWindow | None:
        """`window`, for these engines."""
        return cache_window(self.plans, windows, self.target.max_seq_len)

    @abstractmethod
    def close(self) -> None:
        """End what else runs for the engines: the processes of other ranks."""

    @abstractmethod
    def facts(self, engine: Engine) -> str:
        """What is printed about an engine's backend."""

    @abstractmethod
    def make_round_runner(
        self,
        method: DraftMethod,
        drafter: Drafter,
        draft_len: int,
        acceptance: SyntheticAcceptance | None,
        lengths: tuple[int, ...],
    ) -> RoundRunner | None:
        """Runs generation on the device, between steps in which `drafter` drafts; None if the host
        controls every step."""


class RankSide(ABC):
    """What a backend has in a process of another rank than 0. said: what all ranks hear of it."""

    said: Mapping[str, Any]

    @abstractmethod
    def open(
        self,
        folders: Mapping[str, Path],
        windows: WindowOptions,
        ranks: Ranks,
        said: Sequence[Mapping[str, Any]],
    ) -> Mapping[str, Any]:
        """What executes commands, by the first word of each (`Command.engine`): engines that this
        rank has a part of, by role. said: by each rank, in order."""


class Opener(ABC):
    """One backend's way to open engines."""

    on_gpu: bool

    @abstractmethod
    def check(
        self,
        config: EngineConfig,
        num_threads: int | None,
        *,
        ranks_on_one_device: bool,
        has_host_tier: bool = False,
    ) -> None:
        """Can an engine run here? Reads no weights. Raises Unsupported, BadConfig, NoDevice,
        RebuildNeeded. has_host_tier: with blocks of its cache in host memory."""

    @abstractmethod
    def open(self, folders: Mapping[str, Path], request: OpenRequest, log: Log) -> OpenedEngines:
        """Load the engines, the target first. `log` gets lines for people meanwhile."""

    @abstractmethod
    def rank_side(self, rank: int, size: int, folders: Mapping[str, Path]) -> RankSide:
        """Of a rank that rank 0 leads."""


def _cpu() -> Opener:
    from llmctl.runtime.engines.open_cpu import CpuOpener

    return CpuOpener()


def _gpu() -> Opener:
    from llmctl.runtime.engines.open_gpu import GpuOpener

    return GpuOpener()


def opener_of(backend: str) -> Opener:
    """The opener of a backend's engines."""
    return _gpu() if BACKENDS[backend].on_gpu else _cpu()
