"""Reads a file into device memory by compiled threads (load.cpp), or into host memory, while the
caller does something else."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
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


class ReadingReport(ctypes.Structure):
    """What has come of a reading so far; `is_stopped` is the caller's to set."""

    _fields_ = [
        ("failure", c_int64),
        ("code", c_int64),
        ("position", c_int64),
        ("is_stopped", c_int64),
        ("address", c_uint64),
        ("context", c_uint64),
        ("nanoseconds", c_int64),
    ]


class Reading:
    """Pieces of a file on their way to memory: compiled threads read them from the start on, one of
    this process's own among them. What is not awaited is stopped when nobody refers to it, and when
    the process ends."""

    def __init__(
        self, path: Path, pieces: Sequence[FilePiece], driver: CudaDriver | None = None
    ) -> None:
        """Each piece goes to its address of the driver's device, or of host memory where there is
        no driver. Raises OSError."""
        functions = None if driver is None else table_of(driver.address_of, FUNCTIONS)
        context = None if driver is None else driver.context

        def read(file: int, listed: object, sizes: tuple[int, ...], report: ReadingReport) -> None:
            reached = byref(report)
            load_kernels().llmctl_load(file, listed, *sizes, context, functions, reached)

        self._begin(path, pieces, read, ReadingReport())
        self._check: Callable[[int, str], None] | None = None if driver is None else driver.check

    def _begin(
        self,
        path: Path,
        pieces: Sequence[FilePiece],
        read: Callable[..., None],
        report: ReadingReport,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """read(file, pieces, (count, chunk, ring, threads), report), on a thread; `end` once nobody
        refers to this and the thread has ended."""
        self.path = path
        self.num_bytes = sum(end - begin for begin, end, _ in pieces)
        self._report = report
        listed = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
        sizes = (len(pieces), CHUNK_BYTES, RING, min(NUM_THREADS, os.cpu_count() or 1))
        file = os.open(path, os.O_RDONLY)
        self.file = os.fstat(file)

        def run() -> None:
            try:
                read(file, listed, sizes, report)
            finally:
                os.close(file)

        self._thread = threading.Thread(target=run, name="llmctl-reading", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, report, self._thread, end)

    def wait(self) -> float:
        """Returns when everything has arrived, with the seconds that reading took.

        Raises CorruptEngine (the file shrank), OSError, OutOfMemory and DeviceFailure.
        """
        self._thread.join()
        report = self._report
        if report.failure == _SHORT:
            raise CorruptEngine(
                f"{self.path} ends at byte {report.position} while it is being read",
                fix="build the engine again",
            )
        if report.failure == _READ:
            raise OSError(report.code, os.strerror(report.code), str(self.path))
        if report.failure == _DRIVER:
            assert self._check is not None
            self._check(report.code, "loading weights")
        return float(report.nanoseconds / 1e9)


def table_of(address_of: Callable[[str], int], names: Sequence[str]) -> ctypes.Array[c_void_p]:
    """Functions of the driver for compiled code."""
    return (c_void_p * len(names))(*map(address_of, names))


def _stop(report: ReadingReport, thread: threading.Thread, end: Callable[[], None]) -> None:
    """What has been asked for arrives; then the threads end."""
    report.is_stopped = 1
    thread.join()
    end()
