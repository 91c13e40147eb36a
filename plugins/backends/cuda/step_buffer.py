"""The integers of a step on their way to the device: one buffer there, and pinned copies here."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.core.calls import StepInputs

_RING = 4  # pinned copies of the step: uploads that may be in flight
_ALIGNMENT = 64  # elements of int32, so every array starts at 256 bytes


class Copies(Protocol):
    """What the buffer needs of a driver."""

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None: ...
    def make_event(self) -> Any: ...


class StepBuffer:
    """The step's arrays, one after another in one device buffer, and pinned copies of it.

    Block tables come last: an upload stops behind the rows that its requests use.
    """

    def __init__(self, limits: StepLimits, device: torch.device, driver: Copies) -> None:
        self._max_seq_len = limits.max_seq_len
        max_blocks = -(-limits.max_seq_len // limits.tokens_per_block)
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (limits.max_num_tokens,),
            "position_ids": (limits.max_num_tokens,),
            "slot_mapping": (limits.max_num_tokens,),
            "cu_q": (limits.max_batch_size + 1,),
            "kv_len": (limits.max_batch_size,),
            "logit_rows": (limits.max_num_rows,),
            "block_tables": (limits.max_batch_size, max_blocks),
        }
        assert set(shapes) == {field.name for field in fields(DeviceStep)}
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
        for name in ("token_ids", "position_ids", "slot_mapping", "cu_q", "kv_len", "logit_rows"):
            _fill(arrays[name], getattr(step, name), name)
        rows, width = step.block_tables.shape
        table = arrays["block_tables"]
        assert rows <= table.shape[0], f"{rows} requests; the engine takes {table.shape[0]}"
        assert step.kv_len.max(initial=0) <= self._max_seq_len, "blocks behind the engine's last"
        # A draft engine may be made for fewer tokens than the target, whose tables it gets.
        width = min(width, table.shape[1])
        table[:rows, :width] = step.block_tables[:, :width]
        used = self._starts["block_tables"] + rows * table.shape[1]
        source = self._pinned[slot].data_ptr()
        self._driver.copy_to_device(self._buffer.data_ptr(), source, 4 * used, stream)
        self._events[slot].record(stream)


def _fill(target: NDArray[np.int32], source: NDArray[np.int32], name: str) -> None:
    assert len(source) <= len(target), f"{len(source)} {name}; the engine takes {len(target)}"
    target[: len(source)] = source
