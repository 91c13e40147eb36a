"""Where the time of a prompt's step goes, kernel by kernel, on rank 0's GPU.

    python -m scripts.profile.prompts --engine-dir DIR [--tokens 500] [--prompts 6]

Of an engine with generated weights, of one rank or several. Prompts come one after another and get
one token each. As in scripts/profile/rounds.py a kernel is charged with the time between the end of
the one before it and its own end; `nothing ran` is the part of it before its start, in which the
device waited for the host. What ranks exchange is charged to the kernel that waits for it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from scripts.profile.rounds import Kernel, device_kernels, report, run_all

WARM_UP = 3  # prompts


def idle_us(kernels: list[Kernel]) -> float:
    """Microseconds between the first kernel's start and the last one's end in which none ran."""
    idle, before = 0.0, kernels[0][1]
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        idle += max(0.0, start - before)
        before = max(before, end)
    return idle


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=500, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=6)
    arguments = parser.parse_args()
    options = EngineOptions(arguments.engine_dir, PlainDecoding(), enable_block_reuse=False)
    opened = OpenEngines(check_engines(options))
    first, stop = opened.checked.target.weights["ordinary_tokens"]
    random = np.random.default_rng(0)
    sizes = (WARM_UP + arguments.prompts, arguments.tokens)
    requests = [Request(tuple(ids), 1) for ids in random.integers(first, stop, sizes).tolist()]
    with opened.executor() as executor:
        for request in requests[:WARM_UP]:
            run_all(executor, [request])
        torch.cuda.synchronize()
        prompts, seconds = [], []
        for request in requests[WARM_UP:]:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                began = perf_counter()
                run_all(executor, [request])
                seconds.append(perf_counter() - began)
                torch.cuda.synchronize()
            prompts.append(device_kernels(profiler))
    opened.close()
    report(f"a prompt of {arguments.tokens} tokens", prompts)
    print(f"  {median(map(idle_us, prompts)):9.1f} us nothing ran")
    print(f"  {1e3 * median(seconds):9.2f} ms until the host had its token")


if __name__ == "__main__":
    main()
