"""Where the time of a round goes, kernel by kernel.

    python -m scripts.profile.rounds --engines DIR --row 70b+1b [--rounds 6] [--batch 64]
        [--context 1000]

A row has a name of scripts/bench/cuda.py: a target, alone or with what drafts for it.
Kernels of a round overlap (programmatic launches start early and wait), so a kernel is charged with
the time between the end of the one before it and its own end. Sums per kernel name, in order of
time, for drafting and verification apart; times are medians over the rounds.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from scripts.bench.drafting import find_drafting

Kernel = tuple[str, float, float]  # its name, start and end in microseconds


def run_all(executor: Executor, requests: list[Request]) -> None:
    """Until the last has ended."""
    waiting = set(executor.enqueue_requests(requests))
    while waiting:
        waiting -= {response.request_id for response in executor.await_responses()}


def device_kernels(profiler: profile) -> list[Kernel]:
    """All that were profiled, in the order of their ends."""
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "mem" not in event.name.lower()
    ]
    return sorted(events, key=lambda event: event[2])


def kernels_of(
    opened: OpenEngines, arguments: argparse.Namespace, *, is_speculative: bool
) -> list[list[Kernel]]:
    """Per round of the whole batch: (name, start, end) of its kernels in the order of their ends,
    microseconds."""
    random = np.random.default_rng(0)
    first, stop = opened.checked.target.weights["ordinary_tokens"]
    prompts = random.integers(first, stop, (arguments.batch, arguments.context)).tolist()
    tokens = 12 * arguments.rounds if is_speculative else arguments.rounds + 8
    # Requests that start earlier write until the last prompt is in.
    tokens += 2 * arguments.batch * arguments.context // opened.target.max_num_tokens
    requests = [Request(input_token_ids=tuple(ids), max_tokens=tokens) for ids in prompts]
    with opened.executor(is_speculative=is_speculative) as executor:
        run_all(executor, requests)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run_all(executor, requests)
            torch.cuda.synchronize()
    found: list[list[Kernel]] = [[]]
    for event in device_kernels(profiler):
        found[-1].append(event)
        if event[0].startswith("accept"):
            found.append([])
    rounds = found[2:-1]  # the first holds the prompt
    usual = Counter(map(len, rounds)).most_common(1)[0][0]
    return [kernels for kernels in rounds if len(kernels) == usual][-arguments.rounds :]


def charge(kernels: list[Kernel]) -> dict[str, tuple[float, int]]:
    """name -> (microseconds charged, launches)."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    before = kernels[0][1]
    for name, _, end in kernels:
        times[name] += end - before
        counts[name] += 1
        before = max(before, end)
    return {name: (times[name], counts[name]) for name in times}


def report(title: str, rounds: list[list[Kernel]]) -> None:
    """Medians over the rounds."""
    charges = [charge(kernels) for kernels in rounds]
    total = median(sum(time for time, _ in each.values()) for each in charges)
    print(f"{title}: {total / 1e3:.3f} ms, {len(rounds[0])} kernels")
    names = sorted(charges[0], key=lambda name: -charges[0][name][0])
    for name in names[:14]:
        time = median(each.get(name, (0.0, 0))[0] for each in charges)
        count = charges[0][name][1]
        print(f"  {time:9.1f} us {count:5d} x {time / count:7.2f}  {name[:70]}")


def sequence(kernels: list[Kernel], first: int, count: int) -> None:
    """Some consecutive kernels with what each is charged."""
    before = kernels[first - 1][2]
    for name, start, end in kernels[first : first + count]:
        print(f"    {end - before:7.2f} us charged, {end - start:7.2f} resident  {name[:60]}")
        before = end


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--row", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1, help="sequences in flight")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt")
    arguments = parser.parse_args()
    drafting = find_drafting(arguments.row)
    method = PlainDecoding() if drafting is None else drafting.method(arguments.engines)
    target = arguments.row if drafting is None else drafting.target
    room = max(8192, 2 * arguments.batch * (arguments.context + 256))
    options = EngineOptions(arguments.engines / target, method, max_tokens=room)
    opened = OpenEngines(check_engines(options))
    plain = kernels_of(opened, arguments, is_speculative=False)
    report(f"{target} plain step of {arguments.batch}", plain)
    sequence(plain[0], len(plain[0]) // 2, 9)
    if drafting is not None:
        rounds = kernels_of(opened, arguments, is_speculative=True)
        splits = [max(i for i, k in enumerate(r) if k[0].startswith("feed")) for r in rounds]
        report("drafting", [r[:i] for r, i in zip(rounds, splits, strict=True)])
        sequence(rounds[0], splits[0] // 2, 9)
        report("verification", [r[i:] for r, i in zip(rounds, splits, strict=True)])
        sequence(rounds[0], splits[0] + (len(rounds[0]) - splits[0]) // 2, 9)


if __name__ == "__main__":
    main()
