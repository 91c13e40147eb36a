"""A GPU made of the CPU's kernels, so that the host's part of the CUDA backend runs without one.

The program keeps a step's integers in arrays of its own, as the device does, runs whatever shape is
enqueued from what it finds there, and checks that padding is what kernels rely on. Arithmetic is
the cpu backend's, so tokens must equal that backend's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmctl.builder.engine_format import read_engine_config
from llmctl.plugins.backends.cpu import CpuProgram, CpuSampling
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    Launch,
    StepLimits,
    StepShape,
    step_shapes,
)
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.core.calls import OpCall, StepInputs, Trees
from llmctl.plugins.ops.kv_compact.reference import compact
from llmctl.plugins.ops.rank_argmax.chunks import PEER_CHUNK
from llmctl.plugins.ops.rank_offers.kernel import SharedLogits
from llmctl.plugins.ops.rank_offers.reference import list_shares
from llmctl.plugins.ops.sampling import kernel
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch
from llmctl.plugins.ops.sampling.spec import SamplingRow
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.rotary_tables import open_with_tables
from llmctl.runtime.request import SamplingConfig
from support.beyond_cache import positions_in_order, slots_elsewhere, tables_for
from support.kernel import step_arrays


def stale_step(limits: StepLimits) -> DeviceStep:
    """Arrays that hold what must not be read."""
    shapes = step_shapes(limits)
    return DeviceStep(
        **{name: torch.full(shape, 10**6, dtype=torch.int32) for name, shape in shapes.items()}
    )


class FakeProgram:
    """`CudaProgram` with CPU tensors."""

    def __init__(
        self,
        calls: list[OpCall],
        limits: StepLimits,
        row_inputs: Sequence[torch.Tensor] = (),
        program: Any = None,
        *,
        has_peers: bool = False,
        make: Callable[..., Any] = CpuProgram,
    ) -> None:
        """program: what computes; None: what `make` makes, as of other calls: the compiled
        kernels."""
        self.limits, self.has_peers, self._make = limits, has_peers, make
        ops = {call.op for call in calls}
        self._has_cache, self._continues = "paged_attention" in ops, "recurrence" in ops
        self.shapes: list[StepShape] = []  # as enqueued
        self.step = stale_step(limits)
        self._program = program or make(calls, row_inputs)

    def beside(
        self, calls: list[OpCall], row_inputs: Sequence[torch.Tensor], kv_dtype: str = ""
    ) -> FakeProgram:
        peers = {"has_peers": self.has_peers, "make": self._make}
        return FakeProgram(calls, self.limits, row_inputs, **peers)

    def offers(
        self,
        logits: SharedLogits,
        keys: torch.Tensor,
        sums: torch.Tensor | None,
        rows: int,
        count: int,
    ) -> Callable[[], None]:
        """The same, of what the kernel of ranks would list."""

        def store() -> None:
            stride = keys.numel() // len(logits.tensors)
            for head, share in enumerate(logits.tensors):
                shares = [part[:rows] for part in self._program.parts_of(share, logits.ranks)]
                found, own = list_shares(shares, logits.vocab, count, PEER_CHUNK)
                keys.view(-1)[head * stride :][: found.numel()] = found.flatten()
                if sums is not None:
                    sums.view(-1)[: own.numel()] = own.flatten()

        return store

    def best_ids(
        self, out: torch.Tensor, rows: int, *, stride: int = 1, offset: int = 0
    ) -> Callable[[], None]:
        """A function instead of a launch, to be called."""

        def store() -> None:
            out.view(-1)[offset : offset + rows * stride : stride] = self._program.best_ids(rows)

        return store

    def keeps_best(self, rows: int) -> bool:
        return False  # the compiled kernels store logits

    def best_draws(
        self,
        out: torch.Tensor,
        scratch: SamplingScratch,
        rows: DrawnRows,
    ) -> list[Callable[[], None]]:
        """The same, of what `kernel.sample` would draw from the logits that ranks have."""

        def draw() -> None:
            logits = self._program.shared_logits(rows.count)
            for launch in kernel.sample(logits, out, scratch, rows, has_wide=False):
                launch_sampling(launch)

        return [draw]

    def upload(self, step: StepInputs, stream: int) -> None:
        for name, numbers in step_arrays(step).items():
            source, target = torch.from_numpy(numbers), getattr(self.step, name)
            if name in ("block_tables", "paths"):
                target[: len(source), : source.shape[1]] = source
            elif name not in ("tree_start", "tree_root") or step.trees is not None:
                target[: len(source)] = source

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self._kv_cache = kv_cache

    def enqueue(self, shape: StepShape, stream: int) -> None:
        self.shapes.append(shape)
        step = self.step
        cu_q = step.cu_q[: shape.num_requests + 1].numpy()
        if self._continues:  # its tokens are those of its rows, whatever was uploaded last
            cu_q = np.array([0, shape.num_tokens], np.int32)
        kv_len = step.kv_len[: shape.num_requests].numpy()
        tokens, requests = int(cu_q[-1]), int((kv_len > 0).sum())
        kv_len = kv_len[:requests]
        counts = np.diff(cu_q)
        assert tokens <= shape.num_tokens
        assert (counts[:requests] > 0).all() and (counts[requests:] == 0).all()
        if not requests:  # launches that are recorded before a step has any
            return
        assert counts.max() <= shape.max_query_len and kv_len.max() <= shape.max_kv_len
        slots = step.slot_mapping[:tokens].numpy()
        positions = step.position_ids[:tokens].numpy()
        if self._has_cache and not shape.max_tree_len:
            entries = np.repeat(kv_len, counts[:requests])
            assert ((slots >= 0) | (positions >= entries)).all(), "of a position that has a block"
            positions, kv_len = positions_in_order(positions, cu_q, kv_len)
        assert (step.slot_mapping[tokens : shape.num_tokens] == -1).all()
        assert (step.position_ids[tokens : shape.num_tokens] == 0).all()
        rows = step.logit_rows[: shape.num_rows].numpy()
        if not self._continues:
            assert (rows < shape.num_tokens).all()
            rows = np.minimum(rows, max(tokens - 1, 0))  # those of padding are read by nobody
        trees = None
        if shape.max_tree_len:
            starts = step.tree_start[:requests].numpy()
            roots = step.tree_root[:requests].numpy()
            behind = (kv_len - roots)[starts >= 0]
            assert behind.min(initial=1) > 0 and behind.max(initial=0) <= shape.max_tree_len
            trees = Trees(starts, step.paths.numpy())
            first = cu_q[:requests][starts >= 0]
            if ((slots[first] < 0) | (positions[first] > roots[starts >= 0])).any():
                positions = positions.copy()
                trees = Trees(starts, trees.paths.copy(), np.where(starts >= 0, roots, 0))
                for request in np.flatnonzero(starts >= 0):
                    for token in range(cu_q[request], cu_q[request + 1]):
                        if slots[token] < 0:  # any, at the root's position, which the CPU refuses
                            positions[token] += 1
                            trees.paths[starts[request] + token - cu_q[request], 1] = 1
        tables, borrowed = step.block_tables[:requests].numpy(), []
        if self._has_cache:
            size = self._kv_cache.shape[4]
            tables = tables_for(tables, step.kv_len[:requests].numpy(), kv_len, size)
            slots, borrowed = slots_elsewhere(slots, tables, self._kv_cache.shape[1], size)
        kept = self._kv_cache[:, borrowed]
        self._program.run(
            StepInputs(
                token_ids=step.token_ids[:tokens].numpy(),
                position_ids=positions,
                cu_q=cu_q[: requests + 1],
                kv_len=kv_len,
                block_tables=np.ascontiguousarray(tables),
                slot_mapping=slots,
                logit_rows=rows,
                trees=trees,
                best_only=shape.best_only,
                context_end=step.context_end[:requests].numpy(),
            ),
            self._kv_cache,
        )
        self._kv_cache[:, borrowed] = kept

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        for launch in launches:
            if callable(launch):  # `bookkeeping_by_reference`, `best_ids`, `best_draws`
                launch()
            elif launch.spec.name.startswith(("beams.", "gather.", "growth.", "lookahead.")):
                run_launches([launch])
            elif launch.spec.name.startswith("kv_compact"):
                _, starts, moves, _ = launch.arguments
                assert isinstance(starts, torch.Tensor) and isinstance(moves, torch.Tensor)
                assert starts[-1] <= len(moves) and launch.grid[1] == len(starts) - 1
                compact(self._kv_cache, list(map(tuple, moves[: int(starts[-1])].tolist())))
            else:
                launch_sampling(launch)


@dataclass
class FakeGraph:
    """What was recorded, done again."""

    record: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.record()


class FakeCapture:
    """Makes fake graphs and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, record: Callable[[], None]) -> FakeGraph:
        self.graphs.append(FakeGraph(record))
        return self.graphs[-1]


def open_on_fake_device(
    engine_dir: Path, queue: DeviceQueue, make: Callable[..., CudaEngine] = CudaEngine
) -> tuple[CudaEngine, FakeCapture]:
    """A cpu engine as one of the CUDA backend. make: takes what CudaEngine does."""
    capture = FakeCapture()
    config = read_engine_config(engine_dir)
    plan, weights = open_with_tables(engine_dir)
    return make(config, plan, weights, FakeProgram, queue, capture), capture


def launch_sampling(launch: Launch) -> None:
    """Argmax and draws with the CPU's code; of the launches of a draw the last does it."""
    logits, out = launch.arguments[:2]
    assert isinstance(logits, torch.Tensor) and isinstance(out, torch.Tensor)
    assert logits.data_ptr() % 16 == 0, "kernels take pointers to be aligned"
    name = launch.spec.name
    if name.startswith("sampling.argmax"):
        rows = launch.grid[1]
        stride, offset = launch.arguments[-2:]
        found = CpuSampling().argmax(logits[:rows].numpy())
    elif name.startswith("sampling.finish"):
        per_request, first, stride, offset, rows = launch.arguments[-5:]
        drawn = [_row(launch, row, per_request, first) for row in range(rows)]
        found = CpuSampling().sample_rows(logits[:rows].numpy(), drawn)
    else:
        assert name.startswith(("sampling.scan", "sampling.weigh", "sampling.sift")), name
        return
    for row, token in enumerate(found.tolist()):
        out.view(-1)[row * stride + offset] = token


def _row(launch: Launch, row: int, per_request: int, first: int) -> SamplingRow:
    """The sampling row that the kernel's arrays describe."""
    arrays = launch.arguments[2:11]
    assert all(array.data_ptr() % 16 == 0 for array in arrays)
    temperature, top_k, top_p, min_p, low, high, stream, greedy, position = (
        array[row // per_request].item() for array in arrays
    )
    params = SamplingConfig(
        temperature=0.0 if greedy else temperature,
        top_k=int(top_k),
        top_p=top_p,
        min_p=min_p,
    )
    seed = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return SamplingRow(params, seed, position + first + row % per_request, stream=stream)
