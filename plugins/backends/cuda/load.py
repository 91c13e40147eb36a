"""Reads a file into device memory by compiled threads (load.cpp), or into host memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cpu.binding import load_kernels

if TYPE_CHECKING:
    from llmctl.plugins.backends.cuda.driver import CudaDriver

FilePiece: TypeAlias = tuple[int, int, int]  # bytes [begin, end) of the file go to an address
CHUNK_BYTES = 1 << 20  # of a buffer: all of them fit into a processor's caches
RING = 3  # buffers of a thread: one is read into while two are fetched
NUM_THREADS = 16
FUNCTIONS = (  # as `LoadDriver` in load.cpp has them
    "cuCtxSetCurrent",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuMemcpyHtoDAsync_v2",
)
_SHORT, _READ, _DRIVER = 1, 2, 3  # `Failure`


class _Piece(ctypes.Structure):
    _fields_ = [("begin", c_int64), ("end", c_int64), ("address", c_uint64)]


class _Report(ctypes.Structure):
    _fields_ = [("failure", c_int64), ("code", c_int64), ("position", c_int64)]


def read_file(path: Path, pieces: Sequence[FilePiece], driver: CudaDriver | None) -> None:
    """Read pieces of a file, each to its address of the driver's device, or of host memory where
    there is no driver. Returns when all have arrived.

    Raises CorruptEngine (the file shrank), OSError, OutOfMemory and DeviceFailure.
    """
    if not pieces:
        return
    listed = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
    functions = None
    if driver is not None:
        functions = (c_void_p * len(FUNCTIONS))(*map(driver.address_of, FUNCTIONS))
    report, context = _Report(), driver.context if driver is not None else None
    threads = min(NUM_THREADS, os.cpu_count() or 1)
    file = os.open(path, os.O_RDONLY)
    try:
        sizes = (len(pieces), CHUNK_BYTES, RING, threads)
        load_kernels().llmctl_load(file, listed, *sizes, context, functions, byref(report))
    finally:
        os.close(file)
    if report.failure == _SHORT:
        raise CorruptEngine(
            f"{path} ends at byte {report.position} while it is being read",
            fix="build the engine again",
        )
    if report.failure == _READ:
        raise OSError(report.code, os.strerror(report.code), str(path))
    if report.failure == _DRIVER:
        assert driver is not None
        driver.check(report.code, "loading weights")
