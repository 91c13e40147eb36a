"""How fast a GPU reads its memory: the limit that measured steps are compared with."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from llmctl.plugins.core.cache_home import cache_home

# Orders in which blocks of threads read an array of a multiple of 8192 numbers, whole.
PATTERNS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "8,192 rows": lambda x: torch.amax(x.view(8192, -1), dim=1),
    "1,024 rows": lambda x: torch.amax(x.view(1024, -1), dim=1),
    "rows of 8,192": lambda x: torch.amax(x.view(-1, 8192), dim=1),
    "columns": lambda x: torch.amax(x.view(-1, 8192), dim=0),
    "one row": torch.amax,
}
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


def read_rates(
    num_bytes: int = _BYTES, places: int = _PLACES, rounds: int = 10
) -> dict[tuple[str, int], list[float]]:
    """TB/s of reducing a large array, by pattern and place: a read of everything and a write of
    next to nothing.

    How fast an array can be read depends on where it lies, by up to 5 % on an H200, and on the
    order: of `PATTERNS` in as many arrays as `places`, each several times. A GPU that was idle is
    given time to reach its clocks.
    """
    arrays, found = [], {}  # all stay, so that each lies elsewhere
    for place in range(places):
        arrays.append(torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda"))
        values = arrays[-1].random_(-(2**31), 2**31 - 1).view(torch.float32)
        for index, (name, pattern) in enumerate(PATTERNS.items()):
            read = partial(pattern, values)
            warm_up(read, WARM_UP_S if index == 0 else 0.0)
            found[name, place] = [num_bytes / ms / 1e9 for ms in elapsed_ms(read, rounds)]
    return found


def read_bandwidth(num_bytes: int = _BYTES, places: int = _PLACES, rounds: int = 10) -> list[float]:
    """TB/s of the fastest pattern in the fastest place."""
    return max(read_rates(num_bytes, places, rounds).values(), key=median)


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How fast memory was read, and how that is known."""

    bytes_per_s: float
    measurement: str


def device_read_rate() -> ReadRate | None:
    """The read rate of device 0, measured once and kept (`cache_home`) until `forget_read_rate`.

    It is measured in what memory is free, which is free again afterwards; None if that is too
    little to tell.
    """
    path = _kept_path()
    kept = _read_kept(path)
    if kept is not None:
        return kept
    num_bytes = array_bytes(torch.cuda.mem_get_info()[0])
    if num_bytes is None:
        return None
    found = read_rates(num_bytes)
    torch.cuda.empty_cache()
    (pattern, _), rates = max(found.items(), key=lambda item: median(item[1]))
    measurement = (
        f"fastest of {len(PATTERNS)} patterns in {_PLACES} places: {pattern} of "
        f"{num_bytes / 1e9:.1f} GB"
    )
    rate = ReadRate(median(rates) * 1e12, measurement)
    _keep(path, rate)
    return rate


def forget_read_rate() -> None:
    """Measure device 0 again next time: a run was faster than what is kept."""
    with suppress(OSError):
        _kept_path().unlink()


def _kept_path() -> Path:
    """Of one card: two of a product differ by a few percent."""
    device = torch.cuda.get_device_properties(0)
    name = re.sub(r"[^A-Za-z0-9-]+", "-", f"{device.name}-{device.uuid}")
    return cache_home() / "llmctl" / "read-rates" / f"{name}.json"


def _read_kept(path: Path) -> ReadRate | None:
    """None where there is none, or a file that is not one: it is measured again."""
    try:
        found = json.loads(path.read_text())
        rate = ReadRate(float(found["bytes_per_s"]), str(found["measurement"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return rate if math.isfinite(rate.bytes_per_s) and rate.bytes_per_s > 0 else None


def _keep(path: Path, rate: ReadRate) -> None:
    """A cache that cannot be written costs time, not correctness."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(rate)))
        scratch.replace(path)


def array_bytes(free_bytes: int) -> int | None:
    """Bytes of each array where so many are free; None if there are too few."""
    each = min(_BYTES, int(free_bytes * _SHARE) // _PLACES)
    return each // (8192 * 4) * (8192 * 4) if each >= _LEAST_BYTES else None
