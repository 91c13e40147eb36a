"""An engine on disk, of one rank or of several, for one GPU: what it takes there, and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmctl.builder.engine_format import (
    EngineConfig,
    Plan,
    PlanOp,
    engine_file,
    open_engine,
    read_engine_config,
    step_limits,
)
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.backends.cuda.kernel_spec import Peers, StepLimits, own_part
from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.shares import is_share
from llmctl.plugins.ops.all_reduce.peers import buffer_bytes
from llmctl.plugins.ops.rank_offers import kernel as rank_offers
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.engine import NO_WINDOWS, kv_bytes_per_block
from llmctl.runtime.engines.graphs import MAX_GRAPHS
from llmctl.runtime.engines.loading import Loading, LoadReport, sum_reports
from llmctl.runtime.engines.lockstep import lockstep_parts, lockstep_plan, name_on, rank_stride
from llmctl.runtime.engines.memory_plan import GRAPH_BYTES_PER_LAUNCH, EngineMemory
from llmctl.runtime.engines.open_tensorrt import (
    kernels_a_step,
    load_binaries,
    open_tensorrt,
    plan_scratch_bytes,
)
from llmctl.runtime.engines.tensorrt_check import present_capability, require_tensorrt
from llmctl.runtime.engines.weight_places import allocated_bytes
from llmctl.runtime.engines.weights_ahead import WeightsAhead
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, apply_windows
from llmctl.runtime.rounds.verification import graph_launches, head_launches

OF_RANKS = ("all_reduce", "all_reduce_norm", "all_gather")


@dataclass(frozen=True, slots=True)
class RankFile:
    """The engine file of one rank, memory-mapped."""

    number: int
    path: Path
    plan: Plan
    tensors: Mapping[str, torch.Tensor]  # stored weights and cubins


@dataclass(frozen=True, slots=True)
class EngineFile:
    """One engine; of several ranks one, or all in lockstep."""

    config: EngineConfig
    plan: Plan
    ranks: tuple[RankFile, ...]
    ahead: WeightsAhead | None = None  # of an engine of one rank

    @classmethod
    def open(
        cls, folder: Path, windows: WindowOptions = NO_WINDOWS, rank: int | None = None
    ) -> EngineFile:
        """Reads config.json and the headers; `windows` narrow the model's own. rank: the one that
        is opened; None: all.

        Raises what `open_engine`, `apply_windows` and `lockstep_plan` raise.
        """
        config = read_engine_config(folder)
        length = int(config.build_config["max_seq_len"])
        numbers = range(config.num_ranks) if rank is None else [rank]
        if BACKENDS[config.backend].compiles_plans:  # which runs one rank alone
            numbers = [0]
        opened = [(number, *open_engine(folder, number)) for number in numbers]
        ranks = tuple(
            RankFile(
                *(number, folder / engine_file(number)),
                apply_windows(plan, windows, length, config.backend),
                tensors,
            )
            for number, plan, tensors in opened
        )
        plan = ranks[0].plan if len(ranks) == 1 else lockstep_plan([rank.plan for rank in ranks])
        return cls(config, plan, ranks)

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
        # A tree's verification, with the window it comes from; or the moves in a draft engine.
        has_windows = step_limits(self.plan, build).lookahead is not None
        if has_windows or (num_engines > 1 and drafts > 1):
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

    def load(
        self,
        queue: DeviceQueue,
        peers: Peers | None = None,
        make: Callable[..., CudaEngine] = CudaEngine,
    ) -> tuple[CudaEngine, LoadReport]:
        """The engine with its weights, read or generated, on the queue's device. peers: of a rank
        that is not alone; make: takes what CudaEngine does."""
        if BACKENDS[self.config.backend].compiles_plans:
            return self._load_tensorrt(queue)
        weights, loadings = self._begin_weights(queue)
        first, count = self.ranks[0], len(self.ranks)
        binaries = load_binaries(self.plan, first.tensors, str(self.config.compute_capability))

        def make_program(calls: list[OpCall], limits: StepLimits) -> CudaProgram:
            parts = own_part if count == 1 else lockstep_parts(rank_stride(first.plan))
            each = peers if count == 1 and self.config.num_ranks > 1 else None
            device, fused = queue.device, self.plan.fused
            return CudaProgram(
                calls, binaries, limits, device, fused=fused, parts=parts, peers=each
            )

        try:  # kernels are loaded while weights arrive
            engine = make(self.config, self.plan, weights, make_program, queue)
        finally:
            report = sum_reports([loading.finish() for loading in loadings])
        return engine, report

    def _load_tensorrt(self, queue: DeviceQueue) -> tuple[CudaEngine, LoadReport]:
        reports: list[LoadReport] = []

        def load() -> Mapping[str, torch.Tensor]:
            weights, loadings = self._begin_weights(queue)
            reports.extend(loading.finish() for loading in loadings)
            return weights

        trt = require_tensorrt(self.config)
        parts = (self.config, self.plan, self.ranks[0].tensors, queue, trt)
        engine = open_tensorrt(*parts, present_capability(), load)
        return engine, sum_reports(reports)

    def _begin_weights(self, queue: DeviceQueue) -> tuple[dict[str, torch.Tensor], list[Loading]]:
        """Stored weights are there when their loadings have finished, generated ones now."""
        weights: dict[str, torch.Tensor] = {}
        loadings: list[Loading] = []
        for rank in self.ranks:
            number = rank.number
            loading = Loading(rank.path, rank.plan, rank.tensors, queue, self.ahead)
            loadings.append(loading)
            own = loading.weights
            if self.config.weights["load_format"] != "auto":
                from llmctl.runtime.engines.planted_weights import generate_weights

                with device_errors("generating weights"), queue.scope():
                    generate_weights(self.config, rank.plan, own, number)
                queue.synchronize()
            if len(self.ranks) > 1:
                own = {name_on(number, name): tensor for name, tensor in own.items()}
            weights |= own
        return weights, loadings


def is_shared(folder: Path) -> bool:
    """Whether an engine has several ranks."""
    return read_engine_config(folder).num_ranks > 1


def slot_bytes(files: Iterable[EngineFile]) -> int:
    """The most that a rank gives the others at once, in a step of one of these engines."""
    plans = [file.plan for file in files]
    given: list[int] = []
    for plan in plans:
        shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
        ops = [op for graph in plan.graphs.values() for op in graph.ops]
        given += [_given(plan, op, shapes) for op in ops]
    return max([*given, *map(_listed, plans)], default=0)


def _given(plan: Plan, op: PlanOp, shapes: Mapping[str, Sequence[int | str]]) -> int:
    """Bytes of float32 that a rank gives to an operator over ranks; none where it is alone."""
    if op.op not in OF_RANKS or int(op.attributes["ranks"]) == 1:
        return 0
    shape = shapes[op.inputs["x"]]
    columns = int(shape[1]) // int(op.attributes.get("leaves", 1))  # a rank's parts are added
    return plan.sizes[str(shape[0])] * columns * 4


def _listed(plan: Plan) -> int:
    """Bytes of the likeliest ids that a rank lists of the logits of heads, of all at once."""
    if plan.head_shares is None:
        return 0
    _, own = plan.head_shares
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    rows = [
        sum(
            plan.sizes[str(shapes[t][0])]
            for t in head.outputs.values()
            if is_share(t) and shapes[t][1] == own
        )
        for head in plan.heads.values()
    ]
    return rank_offers.given_bytes(own, max(rows))


def exchange_bytes(files: Iterable[EngineFile]) -> int:
    """The buffer of a rank that has a device of its own; 0 for one that is alone."""
    files = list(files)
    ranks = max(file.config.num_ranks for file in files)
    return buffer_bytes(ranks, slot_bytes(files)) if slot_bytes(files) else 0
