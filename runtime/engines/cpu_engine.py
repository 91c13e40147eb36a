"""Engines on the CPU. Weights stay mapped from the engine file, so opening costs page-table entries
and no copy, and several processes share one copy in the page cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import EngineConfig, Plan
from llmctl.errors import OutOfMemory
from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.plugins.ops.kv_compact.reference import compact
from llmctl.runtime.engines.engine import Engine, bind_plan, kv_cache_shape, make_calls
from llmctl.runtime.engines.heads import bind_heads, find_head
from llmctl.runtime.kv_cache import Arrival, BlockCopy, CopyKind, Move

ARENA_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class CpuEngine(Engine):
    """Runs a plan with the compiled kernels of `plugins.backends.cpu`."""

    def __init__(self, config: EngineConfig, plan: Plan, weights: Mapping[str, torch.Tensor]):
        super().__init__(config, plan)
        self.weight_bytes = sum(w.numel() * w.element_size() for w in weights.values())
        self._arena = _aligned_empty(plan.arena_bytes)
        tensors = bind_plan(plan, weights, self._arena)
        self._program = CpuProgram(make_calls(plan, tensors))
        self._outputs = {name: tensors[tensor] for name, tensor in plan.outputs.items()}
        self._logits = tensors[plan.logits].numpy()
        self._heads = {
            head.name: (head, CpuProgram(head.calls, head.row_inputs))
            for head in bind_heads(plan, tensors)
        }
        self._kv_cache: torch.Tensor | None = None
        self._host_blocks: torch.Tensor | None = None

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged cache, zeroed. Pages are touched only when a block is first used."""
        fix = "lower --max-tokens-in-paged-kv-cache or --kv-cache-free-gpu-memory-fraction"
        self._kv_cache = self._zeros(num_blocks, "a KV cache", fix)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over all layers (reuse of a partly matching block)."""
        self.copy_blocks([BlockCopy(source, destination, self.tokens_per_block)])

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """A second pool besides the first. Pages are touched only when a block is first used."""
        fix = "lower --kv-cache-host-memory-bytes"
        self._host_blocks = self._zeros(num_blocks, "a host tier of the KV cache", fix)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Arrival | None:
        """Copy in order, immediately: on a CPU host memory is the device's memory."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        pools = {CopyKind.WITHIN: (self._kv_cache, self._kv_cache)}
        if self._host_blocks is not None:
            pools[CopyKind.OFFLOAD] = (self._kv_cache, self._host_blocks)
            pools[CopyKind.ONBOARD] = (self._host_blocks, self._kv_cache)
        for copy in copies:
            source, destination = pools[copy.kind]
            destination[:, copy.dst_block].copy_(source[:, copy.src_block])
        return None

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """Move keys and values of accepted paths."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        compact(self._kv_cache, [move for own in moves for move in own])

    def run(self, step: StepInputs) -> NDArray[np.float32]:
        """Execute one packed step; logits of step.logit_rows in that order."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        self._program.run(step, self._kv_cache)
        logits: NDArray[np.float32] = self._logits[: len(step.logit_rows)]
        return logits

    def run_head(
        self, name: str, step: StepInputs, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Execute a head of the plan; see Engine."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        head, program = find_head(self._heads, name)
        head.write(inputs)
        program.run(step, self._kv_cache)
        return head.outputs(step)

    def top_ids(self, logits: Sequence[torch.Tensor], count: int) -> NDArray[np.int64]:
        """The ids of the largest logits; see Engine."""
        found: NDArray[np.int64] = torch.stack(list(logits)).topk(count).indices.numpy()
        return found

    def top_log_probs(
        self, logits: torch.Tensor, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The likeliest ids; see Engine."""
        ids, log_probs = top_log_probs(logits, count)
        return ids.numpy(), log_probs.numpy()

    def _zeros(self, num_blocks: int, what: str, fix: str) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.plan.kv_cache.dtype)
        try:
            return torch.zeros(kv_cache_shape(self.plan, num_blocks), dtype=dtype)
        except RuntimeError as error:  # torch reports a failed allocation this way
            num_bytes = num_blocks * self.kv_bytes_per_block
            raise OutOfMemory(
                f"{what} of {num_blocks} blocks needs {num_bytes / 1e9:.2f} GB, which is not there",
                fix=fix,
            ) from error


def _aligned_empty(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] whose first byte sits on an ARENA_ALIGNMENT boundary."""
    raw = torch.empty(num_bytes + ARENA_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ARENA_ALIGNMENT
    return raw[start : start + num_bytes]
