"""Loads weights from an engine file to device memory, and computes its rotary tables there.

Compiled threads copy the file through small pinned buffers (`plugins/backends/cuda/load.cpp`), so
the weights are never in this process's memory as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmctl.builder.engine_format import Plan, PlanTensor
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.load import FilePiece, Reading
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.runtime.engines.rotary_tables import fill_rotary_tables
from llmctl.runtime.engines.weight_places import weight_places
from llmctl.runtime.engines.weights_ahead import WeightsAhead


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How long loading took."""

    num_bytes: int
    seconds: float

    @property
    def gigabytes_per_s(self) -> float:
        """Decimal gigabytes a second."""
        return self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        size, speed = self.num_bytes / 1e9, self.gigabytes_per_s
        return f"{size:.3f} GB in {self.seconds:.2f} s, {speed:.1f} GB/s"


def sum_reports(reports: Sequence[LoadReport]) -> LoadReport:
    """Of files that were loaded one after another."""
    return LoadReport(sum(r.num_bytes for r in reports), sum(r.seconds for r in reports))


class Loading:
    """All weights of a plan on their way to the queue's device, in one allocation.

    Those that the engine file `path` stores, `mapped` views of its map, are copied by threads, from
    now on or since `ahead` began; rotary tables are computed; the others are left for whoever
    generates them. Addresses may be used at once, values after `finish`.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        mapped: Mapping[str, torch.Tensor],
        queue: DeviceQueue,
        ahead: WeightsAhead | None = None,
    ) -> None:
        """Raises OutOfMemory, DeviceFailure."""
        places, num_bytes = weight_places(plan)
        taken = None if ahead is None else ahead.take_memory(path, num_bytes)
        with device_errors("allocating the weights"), queue.scope():
            if taken is not None:
                memory = torch.as_tensor(taken, device=queue.device)
            else:
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=queue.device)
        queue.synchronize()  # the copies run on other streams
        self.weights: dict[str, torch.Tensor] = {}
        pieces: list[FilePiece] = []
        for tensor in plan.tensors:
            if tensor.kind != "weight":
                continue
            begin, end = places[tensor.name]
            if tensor.is_stored:
                source = mapped[tensor.name]
                at = source.data_ptr() - source.untyped_storage().data_ptr()
                pieces.append((at, at + end - begin, memory.data_ptr() + begin))
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            self.weights[tensor.name] = memory[begin:end].view(dtype).view(_shape(tensor))
        if taken is not None and ahead is not None:
            self._reading: Reading = ahead.reading
        else:
            driver = cuda_driver(memory.device.index or 0) if memory.is_cuda else None
            self._reading = Reading(path, pieces, driver)
        with device_errors("computing the rotary tables"), queue.scope():
            fill_rotary_tables(plan, self.weights)
        self._queue = queue

    def finish(self) -> LoadReport:
        """Wait until every value is there.

        Raises DeviceFailure, and CorruptEngine where the file shrank.
        """
        with device_errors("loading weights"):
            seconds = self._reading.wait()
        self._queue.synchronize()
        return LoadReport(self._reading.num_bytes, seconds)


def _shape(tensor: PlanTensor) -> tuple[int, ...]:
    assert all(isinstance(dim, int) for dim in tensor.shape), tensor.name
    return tuple(int(dim) for dim in tensor.shape)
