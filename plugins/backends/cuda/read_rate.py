"""How fast a GPU reads its memory: the limit that measured steps are compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

WARM_UP_S = 0.3
_BYTES, _PLACES = 8 << 30, 6
_LEAST_BYTES = 1 << 30  # of an array: far larger than a GPU's caches, and longer than a launch
_SHARE = 0.8  # of the free memory that the arrays may take


def warm_up(work: Callable[[], object], seconds: float) -> None:
    """Run something until a GPU that was idle has reached its clocks."""
    began_s = perf_counter()
    while perf_counter() - began_s < seconds:
        work()
        torch.cuda.synchronize()


def elapsed_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of several runs on the current stream, one after the other."""
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return times


def read_bandwidth(num_bytes: int = _BYTES, places: int = _PLACES, rounds: int = 10) -> list[float]:
    """TB/s of reducing a large array: a read of everything and a write of next to nothing.

    How fast an array can be read depends on where it lies, by up to 5 % on an H200: of as many
    arrays as `places`, the fastest counts. A GPU that was idle is given time to reach its clocks.
    """
    arrays, found = [], []  # all stay, so that each lies elsewhere
    for _ in range(places):
        arrays.append(torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda"))
        rows = arrays[-1].random_(-(2**31), 2**31 - 1).view(torch.float32).view(8192, -1)
        read = partial(torch.amax, rows, dim=1)
        warm_up(read, WARM_UP_S)
        found.append([num_bytes / ms / 1e9 for ms in elapsed_ms(read, rounds)])
    return max(found, key=median)


def free_memory_bandwidth() -> float | None:
    """The same in bytes per second, of arrays that fit into what memory is free; None if that is
    too little to tell. The memory is free again afterwards."""
    num_bytes = array_bytes(torch.cuda.mem_get_info()[0])
    if num_bytes is None:
        return None
    rates = read_bandwidth(num_bytes)
    torch.cuda.empty_cache()
    return median(rates) * 1e12


def array_bytes(free_bytes: int) -> int | None:
    """Bytes of each array where so many are free; None if there are too few."""
    each = min(_BYTES, int(free_bytes * _SHARE) // _PLACES)
    return each // (8192 * 4) * (8192 * 4) if each >= _LEAST_BYTES else None
