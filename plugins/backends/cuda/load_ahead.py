"""Reads a file into device memory before anything else uses the device.

Importing torch takes a second or more, in which nothing of it can allocate memory, and mostly holds
Python's lock. So compiled code makes the device's context, allocates and reads (load.cpp).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

from llmctl.plugins.backends.cpu.binding import load_kernels
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.load import FUNCTIONS, FilePiece, Reading, ReadingReport, table_of

START_FUNCTIONS = (  # as `StartDriver` in load.cpp has them
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuMemAlloc_v2",
)
_LOOK_S = 0.001  # for memory that is being allocated


def driver_library() -> Any:
    """The CUDA driver. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


class DeviceMemory:
    """Memory that a reading has allocated, as torch takes it (`torch.as_tensor`); freed with the
    last reference."""

    def __init__(self, library: Any, report: ReadingReport, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (int(report.address), False),
            "strides": None,
            "version": 2,
        }
        # A process that ends may still use it.
        weakref.finalize(self, _free, library, report).atexit = False


class ReadingAhead(Reading):
    """A reading that brings its own memory: addresses of pieces count from its begin."""

    def __init__(
        self, path: Path, pieces: Sequence[FilePiece], memory_bytes: int, device: int = 0
    ) -> None:
        """memory_bytes: 0 makes the context alone. Raises OSError, also where there is no driver;
        what else fails does so for whoever needs the device."""
        library = driver_library()
        functions = [
            table_of(lambda name: ctypes.cast(getattr(library, name), c_void_p).value or 0, names)
            for names in (START_FUNCTIONS, FUNCTIONS)
        ]

        def read(file: int, listed: object, sizes: tuple[int, ...], report: ReadingReport) -> None:
            rest = (device, memory_bytes, *functions, byref(report))
            load_kernels().llmctl_load_ahead(file, listed, *sizes, *rest)

        load_kernels()  # not on the thread, which may have to wait for Python's lock
        report, self._owner = ReadingReport(), _Owner()
        self.memory_bytes, self._library = memory_bytes, library
        self._check = lambda code, doing: cuda_driver(device).check(code, doing)
        self._begin(path, pieces, read, report, partial(_give_up, library, report, self._owner))

    @property
    def held_bytes(self) -> int:
        """Device memory that is allocated for it: none where it could not be had, or was taken."""
        while self._thread.is_alive() and not self._report.address:
            self._thread.join(_LOOK_S)
        is_held = self._report.address and not self._owner.has_changed
        return self.memory_bytes if is_held else 0

    def take_memory(self) -> DeviceMemory:
        """The memory, once; it outlives this."""
        assert self.held_bytes, "nothing is held"
        self._owner.has_changed = True
        return DeviceMemory(self._library, self._report, self.memory_bytes)


class _Owner:
    """Of memory: the reading, or whoever has taken it."""

    has_changed = False


def _give_up(library: Any, report: ReadingReport, owner: _Owner) -> None:
    if report.address and not owner.has_changed:
        _free(library, report)


def _free(library: Any, report: ReadingReport) -> None:
    library.cuCtxSetCurrent(c_void_p(report.context))
    library.cuMemFree_v2(c_uint64(report.address))
