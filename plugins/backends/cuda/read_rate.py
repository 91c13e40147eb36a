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
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from llmctl.plugins.backends.cuda.arch import ARCHS
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.device_kernels import DeviceKernels
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec, Launch
from llmctl.plugins.core.cache_home import cache_home

TILE = 4096  # numbers that a thread block asks for at a time: 16 KiB, and three such ahead
_BLOCKS_PER_SM = 2
# Orders in which thread blocks read an array: whether they take its tiles in turns.
PATTERNS: Mapping[str, bool] = {"a share for each block": False, "tiles in turns": True}
WARM_UP_S = 0.3
_BYTES, _PLACES = 8 << 30, 6
_LEAST_BYTES = 1 << 30  # of an array: far larger than a GPU's caches, and longer than a launch
_SHARE = 0.8  # of the free memory that the arrays may take


def read_spec(pattern: str) -> KernelSpec:
    """The binary of one of `PATTERNS`."""
    in_turns = PATTERNS[pattern]
    return KernelSpec(
        name="read.turns" if in_turns else "read.shares",
        source="llmctl.plugins.backends.cuda.triton_read:read",
        arguments=("*i32", "*i32", "i32"),
        constants={"IN_TURNS": in_turns, "TILE": TILE, "STAGES": 4},
        num_warps=8,
    )


def read_launch(pattern: str, source: torch.Tensor, out: torch.Tensor) -> Launch:
    """Read all of `source`, int32 of a multiple of `TILE`. out: int32 [thread blocks, TILE]."""
    assert source.numel() % TILE == 0 and out.shape[1] == TILE
    return Launch(read_spec(pattern), (len(out), 1, 1), (source, out, source.numel() // TILE))


def warm_up(work: Callable[[], object], seconds: float) -> None:
    """Run something until a GPU that was idle has reached its clocks."""
    began_s = perf_counter()
    while perf_counter() - began_s < seconds:
        work()
        torch.cuda.synchronize()


def elapsed_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of several runs on the current stream, one after the other, from when
    the host begins to enqueue a run."""
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return times


def queued_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Like `elapsed_ms`, but what is timed is enqueued behind a run that is not: the device waits
    for no host."""
    work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [began.elapsed_time(ended) for began, ended in pairwise(events)]


def capability() -> str:
    """Compute capability of device 0, as `ARCHS` has it."""
    return "{}.{}".format(*torch.cuda.get_device_capability())


def read_rates(
    num_bytes: int = _BYTES, places: int = _PLACES, rounds: int = 10
) -> dict[tuple[str, int], list[float]]:
    """TB/s of reading a large array whole, by pattern and place.

    How fast an array can be read depends on where it lies, by up to 5 % on an H200, and on the
    order: of `PATTERNS` in as many arrays as `places`, each several times. A GPU that was idle is
    given time to reach its clocks. Raises Unsupported for a GPU that kernels are not compiled for.
    """
    device = torch.device("cuda", 0)
    binaries = [compile_kernel(read_spec(name), capability()) for name in PATTERNS]
    kernels = DeviceKernels(binaries, device, driver=None, use_pdl=False)
    num_blocks = _BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(num_blocks, TILE, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    arrays, found = [], {}  # all stay, so that each lies elsewhere
    for place in range(places):
        arrays.append(torch.empty(num_bytes // 4, dtype=torch.int32, device=device).random_())
        for index, name in enumerate(PATTERNS):
            read = partial(kernels.prepare(read_launch(name, arrays[-1], out)), stream)
            warm_up(read, WARM_UP_S if index == 0 else 0.0)
            found[name, place] = [num_bytes / ms / 1e9 for ms in queued_ms(read, rounds)]
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
    little to tell, or if kernels are not compiled for this GPU.
    """
    if capability() not in ARCHS:
        return None
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
    return cache_home() / "llmctl" / "read-rates" / f"{name}-queued.json"


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
    return each // (TILE * 4) * (TILE * 4) if each >= _LEAST_BYTES else None
