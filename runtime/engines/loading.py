"""Loads weights from an engine file to device memory: file -> pinned ring -> device, overlapped.

Several threads read the file, each with its own pair of pinned buffers and its own stream: while
the device fetches one buffer, the thread fills the other. The file is read with pread, which for
cached pages is one copy without page faults, so the weights are never in this process's memory as a
whole.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter

import torch

from llmctl.builder.engine_format import Plan, PlanTensor
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors, new_event, new_stream
from llmctl.runtime.engines.rotary_tables import fill_rotary_tables

WEIGHT_ALIGNMENT = 256  # bytes: what cudaMalloc gives, and two L2 cache lines
CHUNK_BYTES = 16 << 20  # long enough for the bus to reach its full rate
NUM_THREADS = 16  # a core copies 4 to 8 GB/s from the page cache; the bus takes 55


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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes [begin, end) of the file go to `offset` of the device allocation."""

    begin: int
    end: int
    offset: int


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
    weights, pieces, offset = {}, [], 0
    for tensor in plan.tensors:
        if tensor.kind != "weight":
            continue
        num_bytes = sizes[tensor.name]
        if tensor.is_stored:
            source = mapped[tensor.name]
            begin = source.data_ptr() - source.untyped_storage().data_ptr()
            pieces.append(_Piece(begin, begin + num_bytes, offset))
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        data = memory[offset : offset + num_bytes]
        weights[tensor.name] = data.view(dtype).view(_shape(tensor))
        offset += _aligned(num_bytes)
    with device_errors("computing the rotary tables"), queue.scope():
        fill_rotary_tables(plan, weights)
    _Copy(path, memory, pieces).run()
    queue.synchronize()
    num_copied = sum(piece.end - piece.begin for piece in pieces)
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


class _Copy:
    """Copies pieces of a file with several threads."""

    def __init__(self, path: Path, memory: torch.Tensor, pieces: list[_Piece]) -> None:
        self._path = path
        self._memory = memory
        self._is_cuda = memory.device.type == "cuda"
        self._chunks = list(_chunks(sorted(pieces, key=lambda piece: piece.begin)))
        self._next = count()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Copy everything; raises what a thread raised."""
        num_threads = min(NUM_THREADS, os.cpu_count() or 1, len(self._chunks))
        file = os.open(self._path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(max(1, num_threads), "llmctl-load") as pool:
                for done in [pool.submit(self._work, file) for _ in range(num_threads)]:
                    done.result()
        finally:
            os.close(file)

    def _work(self, file: int) -> None:
        """One thread: chunk after chunk, through two buffers in turn."""
        with device_errors("loading weights"):
            if not self._is_cuda:
                buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
                while (chunk := self._take()) is not None:
                    self._read(file, chunk, buffer)
                    self._send(chunk, buffer)
                return
            stream = new_stream(self._memory.device)
            turn = 0
            with torch.cuda.stream(stream):  # first, because another thread's device is number 0
                ring = [
                    (torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), new_event())
                    for _ in range(2)
                ]
                while (chunk := self._take()) is not None:
                    buffer, sent = ring[turn]
                    sent.synchronize()  # returns at once before the first use
                    self._read(file, chunk, buffer)
                    self._send(chunk, buffer)
                    sent.record()
                    turn = 1 - turn
            stream.synchronize()

    def _take(self) -> list[_Piece] | None:
        with self._lock:
            index = next(self._next)
        return self._chunks[index] if index < len(self._chunks) else None

    def _read(self, file: int, chunk: list[_Piece], buffer: torch.Tensor) -> None:
        """The chunk's whole range of the file, gaps between its pieces included."""
        begin, end = chunk[0].begin, chunk[-1].end
        view = buffer.numpy().data
        while begin < end:
            got = os.preadv(file, [view[begin - chunk[0].begin : end - chunk[0].begin]], begin)
            if got == 0:
                raise CorruptEngine(
                    f"{self._path} ends at byte {begin} while it is being read",
                    fix="build the engine again",
                )
            begin += got

    def _send(self, chunk: list[_Piece], buffer: torch.Tensor) -> None:
        for piece in chunk:
            start, size = piece.begin - chunk[0].begin, piece.end - piece.begin
            self._memory[piece.offset : piece.offset + size].copy_(
                buffer[start : start + size], non_blocking=True
            )


def _chunks(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in file order, cut and grouped so that no group's range exceeds CHUNK_BYTES."""
    chunk: list[_Piece] = []
    for piece in pieces:
        begin = piece.begin
        while begin < piece.end:
            room = CHUNK_BYTES - (begin - chunk[0].begin if chunk else 0)
            if room <= 0:
                yield chunk
                chunk = []
                continue
            end = min(piece.end, begin + room)
            chunk.append(_Piece(begin, end, piece.offset + begin - piece.begin))
            begin = end
    if chunk:
        yield chunk


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
