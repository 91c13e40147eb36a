"""Loads weights from an engine file to device memory, and computes its rotary tables there.

Compiled threads copy the file through small pinned buffers (`plugins/backends/cuda/load.cpp`), so
the weights are never in this process's memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from llmctl.builder.engine_format import Plan, PlanTensor
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.load import FilePiece, read_file
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.runtime.engines.rotary_tables import fill_rotary_tables

WEIGHT_ALIGNMENT = 256  # bytes: what cudaMalloc gives, and two L2 cache lines


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


def allocated_bytes(plan: Plan) -> int:
    """Device memory that the weights of a plan take, each on an aligned address."""
    return sum(_aligned(num_bytes) for num_bytes in _sizes(plan).values())


def load_weights(
    path: Path, plan: Plan, mapped: Mapping[str, torch.Tensor], queue: DeviceQueue
) -> tuple[dict[str, torch.Tensor], LoadReport]:
    """All weights of the plan on the queue's device, in one allocation.

    Those that the engine file `path` stores, `mapped` views of its map, are copied; rotary tables
    are computed; the others are left for whoever generates them. Raises OutOfMemory,
    DeviceFailure, CorruptEngine (the file shrank).
    """
    began = perf_counter()
    with device_errors("allocating the weights"), queue.scope():
        memory = torch.empty(allocated_bytes(plan), dtype=torch.uint8, device=queue.device)
    queue.synchronize()  # the copies run on other streams
    sizes = _sizes(plan)
    weights: dict[str, torch.Tensor] = {}
    pieces: list[FilePiece] = []
    offset = 0
    for tensor in plan.tensors:
        if tensor.kind != "weight":
            continue
        num_bytes = sizes[tensor.name]
        if tensor.is_stored:
            source = mapped[tensor.name]
            begin = source.data_ptr() - source.untyped_storage().data_ptr()
            pieces.append((begin, begin + num_bytes, memory.data_ptr() + offset))
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        data = memory[offset : offset + num_bytes]
        weights[tensor.name] = data.view(dtype).view(_shape(tensor))
        offset += _aligned(num_bytes)
    with device_errors("computing the rotary tables"), queue.scope():
        fill_rotary_tables(plan, weights)
    _read(path, memory, pieces)
    queue.synchronize()
    num_copied = sum(end - begin for begin, end, _ in pieces)
    return weights, LoadReport(num_copied, perf_counter() - began)


def _sizes(plan: Plan) -> dict[str, int]:
    """Bytes of each weight."""
    return {
        tensor.name: math.prod(_shape(tensor)) * getattr(torch, tensor.dtype).itemsize
        for tensor in plan.tensors
        if tensor.kind == "weight"
    }


def _shape(tensor: PlanTensor) -> tuple[int, ...]:
    assert all(isinstance(dim, int) for dim in tensor.shape), tensor.name
    return tuple(int(dim) for dim in tensor.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT


def _read(path: Path, memory: torch.Tensor, pieces: Sequence[FilePiece]) -> None:
    """Read ranges of the file to addresses within `memory`."""
    device = memory.device
    driver = cuda_driver(device.index or 0) if device.type == "cuda" else None
    with device_errors("loading weights"):
        read_file(path, pieces, driver)
