"""Uploads the integers of a step to the device: one buffer there, and pinned copies on the host."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits, step_shapes
from llmctl.plugins.core.calls import StepInputs, Trees, tree_lens
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP

_RING = 4  # pinned copies of the step: uploads that may be in flight
_LISTS = ("token_ids", "position_ids", "slot_mapping", "cu_q", "kv_len", "logit_rows")
_ORDER = (*_LISTS, "context_end", "block_tables", "tree_start", "tree_root", "paths")
_ALIGNMENT = 64  # elements of int32, so every array starts at 256 bytes


class Copies(Protocol):
    """What the buffer needs of a driver."""

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None: ...
    def make_event(self) -> Any: ...


class StepBuffer:
    """The step's arrays, one after another in one device buffer, and pinned copies of it.

    Block tables come last: an upload ends after the rows that its requests use. After them are the
    arrays of trees, which only a step with trees uploads, in a separate copy.
    """

    def __init__(self, limits: StepLimits, device: torch.device, driver: Copies) -> None:
        self._max_seq_len = limits.max_seq_len
        known = step_shapes(limits)
        assert set(known) == {field.name for field in fields(DeviceStep)} == {*_ORDER}
        shapes = {name: known[name] for name in _ORDER}
        self._starts: dict[str, int] = {}
        size = 0
        for name, shape in shapes.items():
            self._starts[name] = size
            size += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        if self._buffer.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        self.step = DeviceStep(**{n: self._view(self._buffer, n, s) for n, s in shapes.items()})
        pinned = torch.zeros((_RING, size), dtype=torch.int32, pin_memory=self._buffer.is_cuda)
        self._pinned = pinned  # owns the memory that the arrays view
        self._slots = [
            {name: self._view(row, name, shape).numpy() for name, shape in shapes.items()}
            for row in pinned
        ]
        self._events = [driver.make_event() for _ in range(_RING)]
        self._driver = driver
        self._next = 0

    def _view(self, buffer: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        start = self._starts[name]
        return buffer[start : start + math.prod(shape)].view(shape)

    def upload(self, step: StepInputs, stream: int) -> None:
        """Fill the next pinned copy and enqueue its transfer."""
        slot = self._next
        self._next = (slot + 1) % _RING
        self._events[slot].wait()  # its last transfer: done long ago, unless the host runs ahead
        arrays = self._slots[slot]
        for name in _LISTS:
            _fill(arrays[name], getattr(step, name), name)
        ends = context_ends(step)
        counts = step.cu_q[1:] - step.cu_q[:-1]
        starts = np.maximum(step.kv_len - counts, 0)  # rows of heads have no place in a cache
        is_cut = (starts < ends) & (counts < GROUP)
        assert not is_cut.any(), "tokens with FP8 products in less than a group"
        _fill(arrays["context_end"], ends, "context_end")
        rows, width = step.block_tables.shape
        table = arrays["block_tables"]
        assert rows <= table.shape[0], f"{rows} requests; the engine takes {table.shape[0]}"
        assert step.kv_len.max(initial=0) <= self._max_seq_len, "blocks behind the engine's last"
        # A draft engine may be made for fewer tokens than the target, whose tables it gets.
        width = min(width, table.shape[1])
        table[:rows, :width] = step.block_tables[:, :width]
        self._copy(slot, 0, self._starts["block_tables"] + rows * table.shape[1], stream)
        if step.trees is not None:
            self._upload_trees(step, step.trees, slot, stream)
        self._events[slot].record(stream)

    def _upload_trees(self, step: StepInputs, trees: Trees, slot: int, stream: int) -> None:
        arrays = self._slots[slot]
        _fill(arrays["tree_start"], trees.start, "tree_start")
        _fill(arrays["tree_root"], step.kv_len - tree_lens(step, trees), "tree_root")
        num_paths, width = trees.paths.shape
        paths = arrays["paths"]
        assert num_paths <= len(paths), (
            f"{num_paths} tokens of trees; the engine takes {len(paths)}"
        )
        assert width <= paths.shape[1], "a path longer than the engine's drafts"
        paths[:num_paths, :width] = trees.paths
        end = self._starts["paths"] + num_paths * paths.shape[1]
        self._copy(slot, self._starts["tree_start"], end, stream)

    def _copy(self, slot: int, start: int, end: int, stream: int) -> None:
        """Elements [start, end) of a pinned copy to the device."""
        target, source = self._buffer.data_ptr(), self._pinned[slot].data_ptr()
        self._driver.copy_to_device(
            target + 4 * start, source + 4 * start, 4 * (end - start), stream
        )


def context_ends(step: StepInputs) -> NDArray[np.int32]:
    """`StepInputs.context_end`, zeros for None."""
    if step.context_end is None:
        return np.zeros(step.num_requests, np.int32)
    return step.context_end


def _fill(target: NDArray[np.int32], source: NDArray[np.int32], name: str) -> None:
    assert len(source) <= len(target), f"{len(source)} {name}; the engine takes {len(target)}"
    target[: len(source)] = source
