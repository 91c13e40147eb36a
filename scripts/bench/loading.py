"""How fast an engine's weights are loaded from its file to a GPU.

    python -m scripts.bench.loading ENGINE --name 8b [--rounds 5] [--output docs/performance]

Rows, in GB/s (decimal) of what is copied, each with minimum, median and maximum over the rounds:

  load-NAME-link     the limit of the two below: 1 GiB of pinned memory to the device, at once
  load-NAME-cached   an engine whose file is in the page cache
  load-NAME-disk     one whose file has to be read from the disk (its pages dropped before)

An engine with generated weights (--load-format planted or dummy) is refused.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from statistics import median

import torch

from llmctl.builder.engine_format import engine_file
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.backends.cuda.read_rate import elapsed_ms
from llmctl.runtime.engines.engine_file import EngineFile
from scripts.bench.rows import Table, row

LINK_BYTES = 1 << 30


def link_rates(rounds: int) -> list[float]:
    """GB/s of one copy from pinned memory to the device."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    times = elapsed_ms(lambda: target.copy_(source, non_blocking=True), rounds + 1)
    return [LINK_BYTES / ms / 1e6 for ms in times[1:]]  # the first sets the copy up


def drop_pages(path: Path) -> None:
    """Leave nothing of a file in the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)  # only clean pages are dropped
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def open_whole(folder: Path) -> EngineFile:
    """The engine, which stores all of its weights; exits where it does not."""
    file = EngineFile.open(folder)
    if file.config.weights["load_format"] != "auto":
        sys.exit(f"{folder} makes its weights when it is loaded: build it from a whole checkpoint")
    return file


def load_rates(folder: Path, rounds: int, *, is_cached: bool) -> list[float]:
    """GB/s of opening the engine, time after time; every engine is let go before the next."""
    rates = []
    for _ in range(rounds):
        if not is_cached:
            drop_pages(folder / engine_file(0))
        opened, report = open_whole(folder).load(DeviceQueue("cuda"))
        rates.append(report.gigabytes_per_s)
        del opened
        gc.collect()
        torch.cuda.empty_cache()
    return rates


def main() -> None:
    """Parse, measure, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--name", required=True, help="of the engine, in the rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for <device>.jsonl and <device>.md")
    arguments = parser.parse_args()
    table, prefix = Table(arguments.output), f"load-{arguments.name}"
    links = link_rates(arguments.rounds)
    table.add(row(f"{prefix}-link", "GB/s", links))
    size = f"{(arguments.engine / engine_file(0)).stat().st_size / 1e9:.2f} GB"
    for what, is_cached in (("disk", False), ("cached", True)):  # the first leaves it in the cache
        rates = load_rates(arguments.engine, arguments.rounds, is_cached=is_cached)
        table.add(row(f"{prefix}-{what}", "GB/s", rates, median(links), size))


if __name__ == "__main__":
    main()
