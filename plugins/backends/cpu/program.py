"""The CPU backend's program: all calls of a plan in one C call per step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.backends.cpu.binding import (
    DTYPES,
    Op,
    Step,
    TensorRef,
    check,
    load_kernels,
)
from llmctl.plugins.backends.cpu.ranks import Ranks
from llmctl.plugins.core.calls import Extent, OpCall, StepInputs, row_extents
from llmctl.plugins.core.operators import CPU_KINDS, SPECS, check_call

if TYPE_CHECKING:
    import torch

_INT32 = np.dtype(np.int32)


class CpuProgram:
    """Runs a list of calls with the compiled kernels.

    Raises CorruptEngine for a call that breaks its spec, Unsupported for a size the kernels cannot
    hold, NoDevice when the library is not built. Not re-entrant: one step at a time.
    """

    def __init__(
        self,
        calls: Sequence[OpCall],
        row_inputs: Sequence[torch.Tensor] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """row_inputs: tensors that are there before the first call and have the step's rows.
        ranks: those that run the program together; None: this process alone."""
        for call in calls:
            check_call(call)
        self._calls = tuple(calls)  # keeps the tensors alive whose addresses the ops hold
        extents = row_extents(calls, row_inputs=row_inputs)
        ops = (Op * len(calls))(*map(_pack, calls, extents))
        handle = ctypes.c_void_p()
        self._ranks = ranks  # lives as long as the program
        others = None if ranks is None else ranks.handle
        check(load_kernels().llmctl_program_create(ops, len(calls), others, ctypes.byref(handle)))
        weakref.finalize(self, load_kernels().llmctl_program_destroy, handle.value)
        self._handle = handle
        self._run = load_kernels().llmctl_run
        self._step = Step()
        self._step_address = ctypes.addressof(self._step)
        self._kv_cache: torch.Tensor | None = None

    @property
    def handle(self) -> int:
        """The program as other calls of the library take it; valid while this object lives."""
        assert self._handle.value is not None
        return self._handle.value

    def run(
        self, step: StepInputs, kv_cache: torch.Tensor, best_ids: NDArray[np.int32] | None = None
    ) -> None:
        """Execute every call in order. best_ids [R]: of a step that is `best_only`, where rank 0
        writes the best id of each row, -1 for one with NaN."""
        if kv_cache is not self._kv_cache:
            self._bind_cache(kv_cache)
        packed = self._step
        packed.num_tokens = len(step.token_ids)
        packed.num_requests = len(step.kv_len)
        packed.num_rows = len(step.logit_rows)
        packed.max_blocks = step.block_tables.shape[1]
        packed.token_ids = _address(step.token_ids)
        packed.position_ids = _address(step.position_ids)
        packed.cu_q = _address(step.cu_q)
        packed.kv_len = _address(step.kv_len)
        packed.block_tables = _address(step.block_tables)
        packed.slot_mapping = _address(step.slot_mapping)
        packed.logit_rows = _address(step.logit_rows)
        assert len(step.position_ids) == len(step.slot_mapping) == packed.num_tokens
        assert len(step.cu_q) - 1 == len(step.block_tables) == packed.num_requests
        trees = step.trees
        packed.tree_start = None if trees is None else _address(trees.start)
        if trees is not None:
            assert len(trees.start) == packed.num_requests and trees.paths.ndim == 2
            packed.paths = _address(trees.paths)
            packed.num_paths, packed.path_width = trees.paths.shape
            assert trees.roots is None or len(trees.roots) == packed.num_requests
            packed.tree_roots = None if trees.roots is None else _address(trees.roots)
        assert step.best_only == (best_ids is not None)
        packed.best_ids = None if best_ids is None else _address(best_ids)
        assert best_ids is None or len(best_ids) == packed.num_rows
        status = self._run(self._handle, self._step_address)
        if status:
            check(status)

    def _bind_cache(self, kv_cache: torch.Tensor) -> None:
        assert kv_cache.dim() == 6 and kv_cache.is_contiguous()
        layers, blocks, _, heads, tokens_per_block, size = kv_cache.shape
        packed = self._step
        packed.kv_cache = kv_cache.data_ptr()
        packed.kv_dtype = DTYPES[str(kv_cache.dtype).removeprefix("torch.")]
        packed.num_layers, packed.num_blocks, packed.num_kv_heads = layers, blocks, heads
        packed.tokens_per_block, packed.head_size = tokens_per_block, size
        self._kv_cache = kv_cache


def _address(array: NDArray[np.int32]) -> int:
    assert array.dtype == _INT32 and array.flags.c_contiguous
    address: int = array.__array_interface__["data"][0]
    return address


def _pack(call: OpCall, extent: Extent) -> Op:
    spec = SPECS[call.op]
    op = Op(kind=CPU_KINDS.index(call.op), uses_rows=extent == "rows")
    for index, role in enumerate((*spec.inputs, *spec.outputs)):
        tensor = call.inputs.get(role.name, call.outputs.get(role.name))
        if tensor is not None:
            op.tensors[index] = _tensor_ref(tensor)
    attributes = {**spec.attributes, **spec.optional_attributes}
    for index, (name, kind) in enumerate(attributes.items()):
        value = call.attributes.get(name, 0)  # an optional attribute that is absent is 0
        if kind is float:
            op.reals[index] = float(value)
        else:
            op.integers[index] = int(value)
    return op


def _tensor_ref(tensor: torch.Tensor) -> TensorRef:
    shape = (*tensor.shape, 1)[:2]
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    return TensorRef(tensor.data_ptr(), dtype, tensor.dim(), (ctypes.c_int64 * 2)(*shape))
