"""Opening engines on a GPU: device and memory are checked first, weights are read second.

planned = plan_engines({"target": dir, "draft": dir})   reads headers, allocates nothing
planned.memory.lines()                                  the plan, for people
opened = planned.load()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmctl.builder.engine_format import (
    EngineConfig,
    Plan,
    engine_file,
    lookahead_sizes,
    open_engine,
    read_engine_config,
)
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepLimits
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.lookahead.arrays import LookaheadSizes
from llmctl.plugins.ops.sampling.cuda import MAX_ROWS, CudaSampling, scratch_bytes
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.device_check import require_device
from llmctl.runtime.engines.engine import NO_WINDOWS, kv_bytes_per_block
from llmctl.runtime.engines.graphs import MAX_GRAPHS
from llmctl.runtime.engines.host_blocks import BLOCKS_ON_DEVICE
from llmctl.runtime.engines.loading import LoadReport, allocated_bytes, load_weights
from llmctl.runtime.engines.memory_plan import (
    DEFAULT_DEVICE_FRACTION,
    GRAPH_BYTES_PER_LAUNCH,
    DevicePlan,
    EngineMemory,
    plan_device,
)
from llmctl.runtime.engines.open_tensorrt import (
    kernels_a_step,
    load_binaries,
    open_tensorrt,
    plan_scratch_bytes,
)
from llmctl.runtime.engines.tensorrt_check import present_capability, require_tensorrt
from llmctl.runtime.kv_cache import most_step_tokens
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, apply_windows, cache_window
from llmctl.runtime.rounds.upload import state_bytes, tree_bytes
from llmctl.runtime.rounds.verification import (
    MOST_FED,
    ahead_of_need,
    graph_launches,
    head_launches,
)

Launcher = Callable[[Sequence[Launch]], None]


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

    def load(self) -> LoadedEngines:
        """Read the weights. Raises OutOfMemory, DeviceFailure, CorruptEngine."""
        queue = DeviceQueue("cuda")
        loaded = {role: file.load(queue) for role, file in self.files.items()}
        engines = {role: engine for role, (engine, _) in loaded.items()}
        sampling = CudaSampling(queue, _launcher(list(engines.values())))
        return LoadedEngines(engines, sampling, {role: load for role, (_, load) in loaded.items()})


@dataclass(frozen=True, slots=True)
class EngineFile:
    """One engine file, memory-mapped."""

    folder: Path
    config: EngineConfig
    plan: Plan
    tensors: Mapping[str, torch.Tensor]  # stored weights and cubins

    @classmethod
    def open(cls, folder: Path, windows: WindowOptions = NO_WINDOWS) -> EngineFile:
        """Reads config.json and the header; `windows` narrow the model's own.

        Raises what `open_engine` and `apply_windows` raise.
        """
        plan, tensors = open_engine(folder)
        config = read_engine_config(folder)
        length = int(config.build_config["max_seq_len"])
        plan = apply_windows(plan, windows, length, config.backend)
        return cls(folder, config, plan, tensors)

    def memory(
        self,
        role: str,
        sampling: int = 0,
        *,
        round_steps: int = 1,
        num_engines: int = 1,
        ahead: Sequence[int] = (),
    ) -> EngineMemory:
        """What the engine takes on a device, with `sampling` bytes for drawing tokens and for
        rounds. Graphs are those of its own steps and of rounds of `num_engines` engines, each of
        `round_steps` steps, or as many as `ahead` says of each that is captured before the first
        request."""
        build = self.config.build_config
        batch, drafts = int(build["max_batch_size"]), int(build["max_draft_len"])
        kernels = kernels_a_step(self.plan, batch * max(drafts + 1, 2))  # as `Buckets` has them
        launches = MAX_GRAPHS * kernels + graph_launches(kernels, round_steps, num_engines, ahead)
        # A recurrent head runs for each draft of a beam. Counting so for the graph of first steps,
        # too, covers what searches between the steps.
        runs = int(build.get("draft_heads", {}).get("draft_len_per_beam", 1))
        for name, head in self.plan.heads.items():  # one that attends drafts a chain
            each = drafts if head.cache else runs
            launches += head_launches(each * kernels_a_step(self.plan, batch, name), ahead)
        if _lookahead(build) is not None:
            launches += head_launches(1, ahead)
        return EngineMemory(
            role=role,
            weight_bytes=allocated_bytes(self.plan),
            activation_bytes=self.plan.arena_bytes,
            scratch_bytes=self.plan.scratch_bytes + plan_scratch_bytes(self.plan) + sampling,
            graph_bytes=launches * GRAPH_BYTES_PER_LAUNCH,
            kv_bytes_per_block=kv_bytes_per_block(self.plan),
            tokens_per_block=self.plan.kv_cache.tokens_per_block,
            max_batch_size=int(build["max_batch_size"]),
            max_seq_len=int(build["max_seq_len"]),
        )

    def load(self, queue: DeviceQueue) -> tuple[CudaEngine, LoadReport]:
        """The engine with its weights, read or generated, on the queue's device."""
        if BACKENDS[self.config.backend].compiles_plans:
            return self._load_tensorrt(queue)
        weights, report = self._load_weights(queue)
        binaries = load_binaries(self.plan, self.tensors, str(self.config.compute_capability))

        def make_program(calls: list[OpCall], limits: StepLimits) -> CudaProgram:
            fused = self.plan.fused
            return CudaProgram(calls, binaries, limits, queue.device, fused=fused)

        return CudaEngine(self.config, self.plan, weights, make_program, queue), report

    def _load_tensorrt(self, queue: DeviceQueue) -> tuple[CudaEngine, LoadReport]:
        reports: list[LoadReport] = []

        def load() -> Mapping[str, torch.Tensor]:
            weights, report = self._load_weights(queue)
            reports.append(report)
            return weights

        trt = require_tensorrt(self.config)
        parts = (self.config, self.plan, self.tensors, queue, trt)
        engine = open_tensorrt(*parts, present_capability(), load)
        return engine, reports[0]

    def _load_weights(self, queue: DeviceQueue) -> tuple[dict[str, torch.Tensor], LoadReport]:
        weights, report = load_weights(self.folder / engine_file(0), self.plan, self.tensors, queue)
        if any(not t.is_stored for t in self.plan.tensors):
            from llmctl.runtime.engines.planted_weights import generate_weights

            with device_errors("generating weights"), queue.scope():
                generate_weights(self.config, self.plan, weights)
            queue.synchronize()
        return weights, report


def plan_engines(
    folders: Mapping[str, Path],
    *,
    free_fraction: float | None = None,
    max_tokens: int | None = None,
    windows: WindowOptions = NO_WINDOWS,
    lengths: Sequence[int] = (),
    has_host_tier: bool = False,
) -> PlannedEngines:
    """Plan the memory of all engines on the device. `folders` by role, the target first. `lengths`:
    draft lengths whose graphs are captured before the first request. has_host_tier: whether KV
    blocks move to host memory, which needs buffers.

    Raises what `EngineFile.open` raises, NoDevice, RebuildNeeded (another compute capability) and
    OutOfMemory.
    """
    files = {role: EngineFile.open(folder, windows) for role, folder in folders.items()}
    for file in files.values():
        require_device(file.config)
    target, *drafts = files.values()
    limits = target.config.build_config
    draft_len = int(limits["max_draft_len"])
    plans = [file.plan for file in files.values()]
    sampling = sampling_bytes(plans)
    sizes = (int(limits["max_batch_size"]), draft_len)
    sampling += state_bytes(*sizes)
    sampling += tree_bytes(target.plan, *sizes, _lookahead(limits))
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    most = [int(file.config.build_config["max_batch_size"]) for file in files.values()]
    most += [file.plan.max_num_tokens // MOST_FED for file in drafts]
    ahead = [length for _, length in ahead_of_need(min(most), lengths)]
    memories = [
        file.memory(role, sampling, num_engines=len(files), ahead=[1] * len(ahead))
        if file is target
        else file.memory(role, round_steps=draft_len, num_engines=len(files), ahead=ahead)
        for role, file in files.items()
    ]
    if has_host_tier:
        memories = [_with_host_tier(memory) for memory in memories]
    memory = plan_device(
        memories,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        free_fraction=DEFAULT_DEVICE_FRACTION if free_fraction is None else free_fraction,
        max_tokens=max_tokens,
        window=cache_window(plans, windows, int(limits["max_seq_len"])),
        max_step_tokens=most_step_tokens(target.plan.max_num_tokens, draft_len),
    )
    return PlannedEngines(files, memory, torch.cuda.get_device_name())


def _with_host_tier(memory: EngineMemory) -> EngineMemory:
    """With the buffers of `HostBlocks`."""
    buffers = BLOCKS_ON_DEVICE * memory.kv_bytes_per_block
    return replace(memory, scratch_bytes=memory.scratch_bytes + buffers)


def sampling_bytes(plans: Sequence[Plan]) -> int:
    """Device memory of sampling for all engines: rows drawn for the host's steps, and those of a
    whole round. Engines of one vocabulary share it."""
    rows = max(plan.max_num_rows for plan in plans)
    return sum(
        scratch_bytes(count, vocab)
        for vocab in set(map(_vocab, plans))
        for count in (MAX_ROWS, rows)
    )


def _lookahead(build: Mapping[str, Any]) -> LookaheadSizes | None:
    """Of the windows that device rounds can have."""
    return lookahead_sizes(build["speculative_decoding_mode"], build.get("draft_heads", {}))


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
