"""One loaded engine: the plan bound to its weights, an arena and a paged KV cache.

Everything is bound once; a step passes the packed inputs and gets logits back. Weights stay mapped
from the engine file, so opening costs page-table entries and no copy, and several processes share
one copy in the page cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import (
    EngineConfig,
    Plan,
    PlanTensor,
    open_engine,
    read_engine_config,
)
from llmctl.errors import OutOfMemory, Unsupported
from llmctl.plugins.program import OpCall, StepInputs

if TYPE_CHECKING:
    from llmctl.plugins.program import Program

ARENA_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class Executable:
    """An engine ready to run. Not thread-safe: one step at a time.

    `run` takes a packed step and returns logits [rows, vocab_size] float32, valid until the next
    `run`. `allocate_kv_cache` must be called once before the first step.
    """

    def __init__(self, config: EngineConfig, plan: Plan, weights: Mapping[str, torch.Tensor]):
        self.config = config
        self.plan = plan
        build = config.build_config
        self.vocab_size = int(config.pretrained_config["vocab_size"])
        self.max_seq_len = int(build["max_seq_len"])
        self.max_batch_size = int(build["max_batch_size"])
        self.max_num_tokens = plan.max_num_tokens
        self.max_num_rows = plan.max_num_rows
        self.max_draft_len = int(build["max_draft_len"])
        self.tokens_per_block = plan.kv_cache.tokens_per_block
        self.weight_bytes = sum(w.numel() * w.element_size() for w in weights.values())
        self._arena = _aligned_empty(plan.arena_bytes)
        tensors = self._bind(weights)
        calls = [
            OpCall(
                op=op.op,
                name=op.name,
                inputs={role: tensors[name] for role, name in op.inputs.items()},
                outputs={role: tensors[name] for role, name in op.outputs.items()},
                attributes=op.attributes,
            )
            for op in plan.ops
        ]
        self._program = _make_program(config.backend, calls)
        self._logits = tensors[plan.logits].numpy()
        self._kv_cache: torch.Tensor | None = None

    def _bind(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every tensor of the plan by name: weights as mapped, activations as arena views."""
        bound: dict[str, torch.Tensor] = {}
        for tensor in self.plan.tensors:
            if tensor.kind == "weight":
                bound[tensor.name] = weights[tensor.name]
            else:
                bound[tensor.name] = self._activation(tensor)
        return bound

    def _activation(self, tensor: PlanTensor) -> torch.Tensor:
        rows = {"tokens": self.plan.max_num_tokens, "rows": self.plan.max_num_rows}
        shape = [rows[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        assert tensor.offset is not None, f"{tensor.name} has no place in the arena"
        num_bytes = dtype.itemsize * int(np.prod(shape))
        view = self._arena[tensor.offset : tensor.offset + num_bytes]
        return view.view(dtype).view(shape)

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes one block takes over all layers, K and V."""
        cache = self.plan.kv_cache
        dtype: torch.dtype = getattr(torch, cache.dtype)
        entries = cache.num_layers * 2 * cache.num_kv_heads * cache.tokens_per_block
        return entries * cache.head_size * dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged cache, zeroed. Pages are touched only when a block is first used."""
        cache = self.plan.kv_cache
        shape = (
            cache.num_layers,
            num_blocks,
            2,
            cache.num_kv_heads,
            cache.tokens_per_block,
            cache.head_size,
        )
        try:
            self._kv_cache = torch.zeros(shape, dtype=getattr(torch, cache.dtype))
        except RuntimeError as error:  # torch reports a failed allocation this way
            raise OutOfMemory(
                f"a KV cache of {num_blocks} blocks needs "
                f"{num_blocks * self.kv_bytes_per_block / 1e9:.2f} GB, which is not there",
                fix="lower --max-tokens-in-paged-kv-cache or --kv-cache-free-gpu-memory-fraction",
            ) from error

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block over all layers (reuse of a partly matching block)."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        self._kv_cache[:, destination].copy_(self._kv_cache[:, source])

    def run(self, step: StepInputs) -> NDArray[np.float32]:
        """Execute one packed step; logits of step.logit_rows in that order."""
        assert self._kv_cache is not None, "allocate_kv_cache comes first"
        self._program.run(step, self._kv_cache)
        logits: NDArray[np.float32] = self._logits[: len(step.logit_rows)]
        return logits


def open_executable(engine_dir: Path) -> Executable:
    """Load an engine directory for the machine at hand.

    Raises EngineNotFound, CorruptEngine, RebuildNeeded (see engine_format) and Unsupported when
    the engine's backend cannot run here.
    """
    config = read_engine_config(engine_dir)
    plan, weights = open_engine(engine_dir, rank=0)
    return Executable(config, plan, weights)


def _make_program(backend: str, calls: list[OpCall]) -> Program:
    if backend == "cpu":
        from llmctl.plugins.cpu import CpuProgram

        return CpuProgram(calls)
    raise Unsupported(
        f"the engine was built for backend {backend!r}; this version runs 'cpu' engines",
        fix="rebuild with: llmctl build --backend cpu",
    )


def _aligned_empty(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] whose first byte sits on an ARENA_ALIGNMENT boundary."""
    raw = torch.empty(num_bytes + ARENA_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ARENA_ALIGNMENT
    return raw[start : start + num_bytes]
