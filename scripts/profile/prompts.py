"""Where the time of a prompt's step goes, kernel by kernel, on rank 0's GPU.

    python -m scripts.profile.prompts --engine-dir DIR [--tokens 500] [--prompts 6] [--beside 32]
        [--whole-prompts]

Of an engine with generated weights, of one rank or several. Prompts come one after another and get
one token each; `--beside` requests generate all the while, and steps that hold part of the prompt
are shown. As in scripts/profile/rounds.py a kernel is charged with the time between the end of
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

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from scripts.profile.rounds import Kernel, device_kernels, report

WARM_UP = 3  # prompts
BESIDE_TOKENS = 500  # of the prompts of those that generate


def idle_us(kernels: list[Kernel]) -> float:
    """Microseconds between the first kernel's start and the last one's end in which none ran."""
    idle, before = 0.0, kernels[0][1]
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        idle += max(0.0, start - before)
        before = max(before, end)
    return idle


def prompt_steps(kernels: list[Kernel]) -> list[Kernel]:
    """Of what ran while a prompt was read, from the end of the last round before it to its token's
    choice."""
    chunks = [place for place, kernel in enumerate(kernels) if kernel[0].startswith("chunk")]
    if not chunks:
        raise SystemExit(
            "no kernel of prompts' attention ran: are the prompts longer than a round?"
        )
    rounds = [p for p, kernel in enumerate(kernels[: chunks[0]]) if "accept" in kernel[0]]
    drawn = (p for p in range(chunks[-1], len(kernels)) if "argmax" in kernels[p][0])
    return kernels[rounds[-1] + 1 if rounds else 0 : next(drawn, len(kernels) - 1) + 1]


def read_prompt(executor: Executor, request: Request) -> float:
    """Seconds until it has its only token, whatever else ends."""
    began = perf_counter()
    (wanted,) = executor.enqueue_requests([request])
    while all(response.request_id != wanted for response in executor.await_responses()):
        pass
    return perf_counter() - began


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=500, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--beside", type=int, default=0, help="requests that generate")
    parser.add_argument("--whole-prompts", action="store_true", help="no chunks")
    arguments = parser.parse_args()
    options = EngineOptions(
        arguments.engine_dir,
        PlainDecoding(),
        enable_block_reuse=False,
        enable_chunked_context=not arguments.whole_prompts,
    )
    opened = OpenEngines(check_engines(options))
    first, stop = opened.checked.target.weights["ordinary_tokens"]
    random = np.random.default_rng(0)
    sizes = (WARM_UP + arguments.prompts, arguments.tokens)
    requests = [Request(tuple(ids), 1) for ids in random.integers(first, stop, sizes).tolist()]
    others = random.integers(first, stop, (arguments.beside, BESIDE_TOKENS)).tolist()
    with opened.executor() as executor:
        endless = opened.target.max_seq_len - BESIDE_TOKENS
        executor.enqueue_requests([Request(tuple(ids), endless) for ids in others])
        for request in requests[:WARM_UP]:
            read_prompt(executor, request)
        torch.cuda.synchronize()
        prompts, seconds = [], []
        for request in requests[WARM_UP:]:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                seconds.append(read_prompt(executor, request))
                torch.cuda.synchronize()
            prompts.append(prompt_steps(device_kernels(profiler)))
    opened.close()
    beside = f" beside {arguments.beside}" * bool(arguments.beside)
    report(f"a prompt of {arguments.tokens} tokens{beside}", prompts)
    print(f"  {median(map(idle_us, prompts)):9.1f} us nothing ran")
    print(f"  {1e3 * median(seconds):9.2f} ms until the host had its token")


if __name__ == "__main__":
    main()
