"""Engines on the CPU. Weights stay mapped from the engine file, so opening costs page-table entries
and no copy, and several processes share one copy in the page cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import EngineConfig, Plan
from llmctl.plugins.backends.cpu import CpuProgram, CpuSampling
from llmctl.plugins.backends.cpu.beam_search import CpuBeamSearch, HeadGraph
from llmctl.plugins.backends.cpu.ranks import Ranks
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.kv_compact.reference import compact
from llmctl.plugins.ops.sampling.spec import BestIds, Logits
from llmctl.runtime.engines.cpu_cache import CpuCache
from llmctl.runtime.engines.engine import Engine, bind_plan, make_calls
from llmctl.runtime.engines.heads import bind_heads, find_head
from llmctl.runtime.kv_cache import Arrival, BlockCopy, BlockHolder, Move

ARENA_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class CpuEngine(Engine):
    """Runs a plan with the compiled kernels of `plugins.backends.cpu`."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        weights: Mapping[str, torch.Tensor],
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(config, plan)
        self.weight_bytes = sum(w.numel() * w.element_size() for w in weights.values())
        self._arena = _aligned_empty(plan.arena_bytes)
        tensors = bind_plan(plan, weights, self._arena)
        self._program = CpuProgram(make_calls(plan, tensors), ranks=ranks)
        self._outputs = {name: tensors[tensor] for name, tensor in plan.outputs.items()}
        self._logits = tensors[plan.logits].numpy()
        self._heads = {
            head.name: (head, CpuProgram(head.calls, head.row_inputs, ranks))
            for head in bind_heads(plan, tensors)
        }
        self._caches = {name: CpuCache(plan, name) for name in plan.caches}
        self._cache = self._caches[""]

    @property
    def head_caches(self) -> Mapping[str, BlockHolder]:
        """The caches of heads; see Engine."""
        return {name: cache for name, cache in self._caches.items() if name}

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged caches, zeroed."""
        for cache in self._caches.values():
            cache.allocate(num_blocks)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over all layers (reuse of a partly matching block)."""
        self.copy_blocks([BlockCopy(source, destination, self.tokens_per_block)])

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """A second pool besides the first, of every cache."""
        for cache in self._caches.values():
            cache.allocate_host_blocks(num_blocks)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Copy in order, immediately."""
        return self._cache.copy_blocks(copies)

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """Move keys and values of accepted paths."""
        compact(self._cache.tensor, [move for own in moves for move in own])

    def run(self, step: StepInputs) -> Logits:
        """Execute one packed step; logits of step.logit_rows in that order, or their best ids."""
        if step.best_only:
            best = np.empty(step.num_rows, np.int32)
            self._program.run(step, self._cache.tensor, best)
            return BestIds(step.num_rows, lambda: best)
        self._program.run(step, self._cache.tensor)
        logits: NDArray[np.float32] = self._logits[: len(step.logit_rows)]
        return logits

    def run_head(self, name: str, step: StepInputs) -> dict[str, torch.Tensor]:
        """Execute a head of the plan; see Engine."""
        head, program = find_head(self._heads, name)
        program.run(step, self._caches[head.cache].tensor)
        return head.outputs(step)

    def hand_on(self, source: str, head: str, count: int) -> None:
        """Copy what a head left to inputs of a head; see Engine."""
        find_head(self._heads, head)[0].take(find_head(self._heads, source)[0], count)

    def give_rows(
        self, head: str, name: str, sources: Sequence[torch.Tensor], rows: NDArray[np.int64]
    ) -> None:
        """Copy rows of outputs to an input of a head; see Engine."""
        bound, _ = find_head(self._heads, head)
        bound.write_beside(name, sources, torch.from_numpy(rows))

    def as_logits(self, output: torch.Tensor) -> NDArray[np.float32]:
        """The same memory; see Engine."""
        logits: NDArray[np.float32] = output.numpy()
        return logits

    def top_ids(self, logits: Sequence[torch.Tensor], count: int) -> NDArray[np.int64]:
        """The ids of the largest logits; see Engine."""
        found: NDArray[np.int64] = torch.stack(list(logits)).topk(count).indices.numpy()
        return found

    def top_log_probs(
        self, logits: torch.Tensor, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The likeliest ids; see Engine."""
        ids, log_probs = CpuSampling().top_log_probs(logits.numpy(), count)
        return ids.astype(np.int64), log_probs

    def compiled_search(
        self, first: str, following: str, states: Sequence[str]
    ) -> CpuBeamSearch | None:
        """Both graphs and the search in one C call; see Engine."""
        graphs = []
        for name in (first, following):
            head, _ = find_head(self._heads, name)
            kept, carried = (head.output(state) for state in states)
            outputs = (head.output("logits"), (kept, carried))
            graphs.append(HeadGraph.of(head.calls, head.row_inputs, *outputs))
        kept, carried = (find_head(self._heads, following)[0].given(state) for state in states)
        return CpuBeamSearch(graphs[0], graphs[1], (kept, carried))


def _aligned_empty(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] whose first byte sits on an ARENA_ALIGNMENT boundary."""
    raw = torch.empty(num_bytes + ARENA_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ARENA_ALIGNMENT
    return raw[start : start + num_bytes]
