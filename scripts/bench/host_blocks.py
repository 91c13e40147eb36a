"""How fast KV blocks are copied from a GPU and back, and what that costs steps that run meanwhile.

    python -m scripts.bench.host_blocks [--blocks 512] [--layers 32] [--layer-bytes 65536]

The defaults are blocks of 32 tokens of an 8B model with FP8 keys and values: 2 MiB. A step is 128
copies within device memory that take about as long as the kernels of that model. Prints one row
per case; needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from llmctl.plugins.backends.cuda.queue import DeviceQueue, new_event
from llmctl.runtime.engines.host_blocks import HostBlocks
from llmctl.runtime.kv_cache import Arrival, BlockCopy, CopyKind

STEP_BYTES = 4 << 30  # read and written by a step
STEP_KERNELS = 128
REPEATS = 3


class Bench:
    """One cache on the device, one tier of host memory, and steps."""

    def __init__(self, num_blocks: int, num_layers: int, layer_bytes: int) -> None:
        self.queue = DeviceQueue("cuda")
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * num_layers * layer_bytes
        with self.queue.scope():
            shape = (num_layers, 2 * num_blocks, layer_bytes)
            self.cache = torch.zeros(shape, dtype=torch.uint8, device=self.queue.device)
            shape = (STEP_KERNELS, STEP_BYTES // STEP_KERNELS)
            self.source = torch.zeros(shape, dtype=torch.uint8, device=self.queue.device)
            self.destination = torch.zeros_like(self.source)
        began = perf_counter()
        self.host = HostBlocks(self.queue, num_blocks, num_layers, layer_bytes)
        print(f"pinning {self.num_bytes / 1e9:.2f} GB took {perf_counter() - began:.2f} s")

    def copies(self, case: str) -> list[BlockCopy]:
        """Everything leaves, comes back, or changes places with what comes back."""
        numbers = range(self.num_blocks)
        out = [BlockCopy(n, n, 0, CopyKind.OFFLOAD) for n in numbers]
        back = [BlockCopy(n, n, 0, CopyKind.ONBOARD) for n in numbers]
        if case == "swap":
            return [copy for pair in zip(out, back, strict=True) for copy in pair]
        return out if case == "offload" else back

    def step_ms(self, is_going_on: Callable[[], bool]) -> list[float]:
        """Steps one after another, at least five, while something goes on."""
        times: list[float] = []
        while len(times) < 5 or is_going_on():
            began, ended = (new_event(enable_timing=True) for _ in range(2))
            with self.queue.scope():
                began.record()
                for destination, source in zip(self.destination, self.source, strict=True):
                    destination.copy_(source)
                ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        return times

    def row(self, case: str) -> str:
        """Host time a block, the rate of the link, and steps meanwhile."""
        copies = self.copies(case)
        torch.cuda.synchronize()
        began = perf_counter()
        self.host.copy(self.cache, copies)
        self.host.settle()  # all is started
        enqueued = perf_counter()
        torch.cuda.synchronize()
        done = perf_counter()
        rate = len(copies) / self.num_blocks * self.num_bytes / (done - began) / 1e9
        began_beside = perf_counter()
        arrival = self.host.copy(self.cache, copies)
        times = self.step_ms(_unfinished(arrival))
        beside_ms = 1e3 * (perf_counter() - began_beside)
        torch.cuda.synchronize()
        host_us = 1e6 * (enqueued - began) / len(copies)
        return (
            f"{case:8} {host_us:6.1f} us of host a block, {rate:5.1f} GB/s alone; beside steps "
            f"{beside_ms:6.1f} ms, {len(times)} of {statistics.median(times):.2f} ms"
        )


def _unfinished(arrival: Arrival | None) -> Callable[[], bool]:
    return lambda: arrival is not None and not arrival.is_done()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--layer-bytes", type=int, default=65536)
    arguments = parser.parse_args()
    bench = Bench(arguments.blocks, arguments.layers, arguments.layer_bytes)
    for _ in range(2):
        alone = statistics.median(bench.step_ms(lambda: False))
    print(f"a step alone takes {alone:.2f} ms")
    for _ in range(REPEATS):
        for case in ("offload", "onboard", "swap"):
            print(bench.row(case))


if __name__ == "__main__":
    main()
