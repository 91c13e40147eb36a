"""The segment that ranks of one machine share (ranks.h): meetings, and the stream of commands.

The segment is a memfd: it has no name, so it ends with the last process that maps it, however that
ends. Rank 0 makes it and hands its descriptor on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cpu.binding import check, load_kernels


class Ranks:
    """One rank's end of a segment."""

    def __init__(self, rank: int, num_ranks: int, descriptor: int, limit_s: float) -> None:
        """descriptor: of the segment, as `make_segment` returns it; stays the caller's. limit_s:
        how long to wait for another rank, 0 for as long as none is lost."""
        self.rank, self.num_ranks = rank, num_ranks
        library = load_kernels()
        size = library.llmctl_ranks_bytes(num_ranks)
        self._map = mmap.mmap(descriptor, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.handle = library.llmctl_ranks_join(self._base, rank, math.ceil(1000 * limit_s))
        weakref.finalize(self, library.llmctl_ranks_leave, self.handle)

    def lose(self, rank: int) -> None:
        """End the waiting of every rank, now and later: `rank` has ended."""
        load_kernels().llmctl_ranks_lose(self._base, rank)

    def write(self, data: bytes) -> None:
        """Rank 0: give bytes to all others. Raises RankFailure."""
        check(load_kernels().llmctl_ranks_write(self.handle, data, len(data)))

    def read(self, num_bytes: int) -> bytes:
        """Another rank: the next bytes, once they are there. Raises RankFailure."""
        data = ctypes.create_string_buffer(num_bytes)
        check(load_kernels().llmctl_ranks_read(self.handle, data, num_bytes))
        return data.raw


def make_segment(num_ranks: int) -> int:
    """The descriptor of a fresh segment. Raises Unsupported for a number of ranks that cannot be,
    and where the system has no memfd."""
    library = load_kernels()
    size = library.llmctl_ranks_bytes(num_ranks)
    if not size:
        raise Unsupported(f"{num_ranks} ranks are requested; at most 8 run together")
    if not hasattr(os, "memfd_create"):
        raise Unsupported(
            "several ranks share memory by memfd, which this system does not have",
            fix="run them on Linux, or build the engine with --tp-size 1",
        )
    descriptor = os.memfd_create("llmctl-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as shared:
        head = (ctypes.c_char * mmap.PAGESIZE).from_buffer(shared)
        library.llmctl_ranks_init(ctypes.addressof(head), num_ranks)
        del head  # else the map cannot be closed
    return descriptor
