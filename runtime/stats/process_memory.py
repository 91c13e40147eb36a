"""The memory that this process uses now."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from time import monotonic

READ_EVERY_S = 0.1


class MemoryUsage:
    """The last measured memory use. Measuring takes as long as all other statistics of a step, so
    it is done at most ten times a second."""

    def __init__(self) -> None:
        self._read_s = -READ_EVERY_S
        self._found = (0, 0)

    def read(self) -> tuple[int, int]:
        """`cpu_bytes` and `device_bytes`, READ_EVERY_S old at most."""
        now_s = monotonic()
        if now_s - self._read_s >= READ_EVERY_S:
            self._read_s = now_s
            self._found = cpu_bytes(), device_bytes()
        return self._found


def cpu_bytes() -> int:
    """Resident bytes; 0 where the system does not report them (no /proc)."""
    with suppress(OSError, ValueError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def device_bytes() -> int:
    """Bytes that torch has taken on its current device; 0 where no device is in use."""
    torch = sys.modules.get("torch")  # not imported just for this
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())


class PinnedMemory:
    """Host memory that was pinned for transfers, all together."""

    num_bytes = 0


def pinned_bytes() -> int:
    """Bytes that `PinnedMemory` counts."""
    return PinnedMemory.num_bytes
