"""Opening engines on a GPU: device and memory are checked first, weights are read second.

planned = plan_engines({"target": dir, "draft": dir})   reads headers, allocates nothing
planned.memory.lines()                                  the plan, for people
opened = planned.load()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from llmctl.builder.engine_format import Plan, step_limits
from llmctl.plugins.backends.cuda.kernel_spec import Launch, Peers
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.cuda import MAX_ROWS, CudaSampling, scratch_bytes
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.device_check import require_device
from llmctl.runtime.engines.engine import NO_WINDOWS
from llmctl.runtime.engines.engine_file import (
    EngineFile,
    exchange_bytes,
    is_shared,
)
from llmctl.runtime.engines.host_blocks import BLOCKS_ON_DEVICE
from llmctl.runtime.engines.leading_cuda import LeadingCudaEngine
from llmctl.runtime.engines.loading import LoadReport
from llmctl.runtime.engines.memory_plan import (
    DEFAULT_DEVICE_FRACTION,
    DevicePlan,
    EngineMemory,
    plan_device,
)
from llmctl.runtime.engines.weights_ahead import WeightsAhead
from llmctl.runtime.kv_cache import most_step_tokens
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, cache_window
from llmctl.runtime.ranks.leader import Leader
from llmctl.runtime.rounds.upload import state_bytes, tree_bytes
from llmctl.runtime.rounds.verification import MOST_FED, ahead_of_need

Launcher = Callable[[Sequence[Launch]], None]


@dataclass(frozen=True, slots=True)
class GpuLeader:
    """Rank 0 among ranks with a GPU each. watch: raises RankFailure once a kernel has stopped
    waiting for a rank."""

    ranks: Leader
    peers: Peers
    watch: Callable[[], None]


@dataclass(frozen=True, slots=True)
class LoadedEngines:
    """Engines on one stream by role, the target first, and the sampling that serves all."""

    engines: Mapping[str, CudaEngine]
    sampling: CudaSampling
    loads: Mapping[str, LoadReport]  # by role

    @property
    def target(self) -> CudaEngine:
        """The engine whose text is generated."""
        return self.engines["target"]

    @property
    def has_rounds(self) -> bool:
        """Whether generation can run on the device without the host."""
        return all(engine.has_rounds for engine in self.engines.values())


@dataclass(frozen=True, slots=True)
class PlannedEngines:
    """Engines that fit the device; their weights are still on disk."""

    files: Mapping[str, EngineFile]  # by role, the target first
    memory: DevicePlan
    device_name: str

    def load(self, leader: GpuLeader | None = None) -> LoadedEngines:
        """Read the weights. leader: of ranks with a GPU each, this one being rank 0's. Raises
        OutOfMemory, DeviceFailure, CorruptEngine."""
        if leader is None:
            queue = DeviceQueue("cuda")
            loaded = {role: file.load(queue) for role, file in self.files.items()}
        else:
            queue = DeviceQueue("cuda", leader.watch)
            loaded = {
                role: file.load(queue, leader.peers, partial(LeadingCudaEngine, leader.ranks, role))
                for role, file in self.files.items()
            }
        engines = {role: engine for role, (engine, _) in loaded.items()}
        sampling = CudaSampling(queue, _launcher(list(engines.values())))
        return LoadedEngines(engines, sampling, {role: load for role, (_, load) in loaded.items()})


def plan_engines(
    folders: Mapping[str, Path],
    *,
    free_fraction: float | None = None,
    max_tokens: int | None = None,
    windows: WindowOptions = NO_WINDOWS,
    lengths: Sequence[int] = (),
    has_host_tier: bool = False,
    rank: int | None = None,
    ahead: WeightsAhead | None = None,
) -> PlannedEngines:
    """Plan the memory of all engines on the device. `folders` by role, the target first. `lengths`:
    draft lengths whose graphs are captured before the first request. has_host_tier: whether KV
    blocks move to host memory, which needs buffers. rank: the one that has the device, of engines
    of several; None: all have it. ahead: of the target, whose weights are being read already.

    Raises what `EngineFile.open` raises, NoDevice, RebuildNeeded (another compute capability) and
    OutOfMemory.
    """
    files = {
        role: EngineFile.open(folder, windows, rank if is_shared(folder) else None)
        for role, folder in folders.items()
    }
    for file in files.values():
        require_device(file.config)
    role, first = next(iter(files.items()))
    files[role] = replace(first, ahead=ahead)
    target, *drafts = files.values()
    limits = target.config.build_config
    draft_len = int(limits["max_draft_len"])
    plans = [file.plan for file in files.values()]
    sampling = sampling_bytes(plans)
    sizes = (int(limits["max_batch_size"]), draft_len)
    sampling += state_bytes(*sizes)
    windows_of = step_limits(target.plan, limits).lookahead
    sampling += tree_bytes(target.plan, *sizes, windows_of, may_grow=bool(drafts))
    held_bytes = 0 if ahead is None else ahead.held_bytes
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    most = [int(file.config.build_config["max_batch_size"]) for file in files.values()]
    most += [file.plan.max_num_tokens // MOST_FED for file in drafts]
    captured = [length for _, length in ahead_of_need(min(most), lengths)]
    memories = [
        file.memory(role, sampling, num_engines=len(files), ahead=[1] * len(captured))
        if file is target
        else file.memory(role, round_steps=draft_len, num_engines=len(files), ahead=captured)
        for role, file in files.items()
    ]
    if rank is not None:
        memories[0] = _with_more(memories[0], exchange_bytes(files.values()))
    if has_host_tier:
        memories = [_with_host_tier(memory) for memory in memories]
    memory = plan_device(
        memories,
        free_bytes=free_bytes + held_bytes,
        total_bytes=total_bytes,
        free_fraction=DEFAULT_DEVICE_FRACTION if free_fraction is None else free_fraction,
        max_tokens=max_tokens,
        window=cache_window(plans, windows, int(limits["max_seq_len"])),
        max_step_tokens=most_step_tokens(target.plan.max_num_tokens, draft_len),
    )
    return PlannedEngines(files, memory, torch.cuda.get_device_name())


def _with_host_tier(memory: EngineMemory) -> EngineMemory:
    """With the buffers of `HostBlocks`."""
    return _with_more(memory, BLOCKS_ON_DEVICE * memory.kv_bytes_per_block)


def _with_more(memory: EngineMemory, num_bytes: int) -> EngineMemory:
    return replace(memory, scratch_bytes=memory.scratch_bytes + num_bytes)


def sampling_bytes(plans: Sequence[Plan]) -> int:
    """Device memory of sampling for all engines: rows drawn for the host's steps, and those of a
    whole round. Engines of one vocabulary share it."""
    rows = max(plan.max_num_rows for plan in plans)
    return sum(
        scratch_bytes(count, vocab)
        for vocab in set(map(_vocab, plans))
        for count in (MAX_ROWS, rows)
    )


def _vocab(plan: Plan) -> int:
    """Width of the logits."""
    (width,) = [tensor.shape[-1] for tensor in plan.tensors if tensor.name == plan.logits]
    return int(width)


def _launcher(engines: Sequence[CudaEngine]) -> Launcher:
    """Launches sampling kernels out of the first engine that has them for the logits' width."""

    def launch(launches: Sequence[Launch]) -> None:
        logits = launches[0].arguments[0]
        assert isinstance(logits, torch.Tensor)
        fitting = [engine for engine in engines if engine.vocab_size == logits.shape[1]]
        engine = fitting[0] if fitting else engines[-1]
        engine.program.launch(launches, engine.queue.handle)

    return launch
