"""Where the time of verifying a tree goes, kernel by kernel, beside chains.

    python -m scripts.profile.trees --engine DIR [--context 1000] [--tokens 11,21,64]

DIR is an engine with Medusa heads and room for 63 drafts (scripts/bench/build_engines makes
70b-medusa and 8b-medusa). For each number of tokens a chain and a tree (the first nodes of
mc_sim_7b_63) are verified by replayed CUDA graphs under PyTorch's profiler; kernels are charged as
in scripts/profile/rounds.py. The last lines are the kernels of one layer in the middle.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from llmctl.plugins.backends.cuda.read_rate import warm_up
from llmctl.runtime.engines.graphs import capture_graph
from llmctl.runtime.rounds.verification import enqueue_tree_verification, enqueue_verification
from scripts.bench.trees import Rounds
from scripts.profile.rounds import report, sequence

REPLAYS, LAYER = 8, 10


def kernels_of(rounds: Rounds, record: Callable[[], None], context: int) -> list[list[tuple]]:
    """Per replay: (name, start, end) of its kernels in the order of their ends, microseconds."""
    found = []
    with rounds.queue.scope():
        rounds.state.committed[: rounds.batch] = context
        record()
        graph = capture_graph(rounds.queue, record)
        warm_up(graph.replay, 0.1)
        for _ in range(REPLAYS):
            rounds.state.committed[: rounds.batch] = context
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                graph.replay()
                torch.cuda.synchronize()
            events = [
                (event.name, event.time_range.start, event.time_range.end)
                for event in profiler.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
                and "mem" not in event.name.lower()
            ]
            found.append(sorted(events, key=lambda event: event[2]))
    return found[2:]


def main() -> None:
    """Parse, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--tokens", default="11,21,64")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    rounds = Rounds(options.engine, options.batch, options.context)
    branches = rounds.drafter.branches
    for tokens in map(int, options.tokens.split(",")):
        shape = rounds.shape(options.context, tokens - 1)
        for name, record in (
            ("chain", partial(enqueue_verification, rounds.steps, None, shape)),
            ("tree", partial(enqueue_tree_verification, rounds.steps, branches, shape)),
        ):
            replays = kernels_of(rounds, record, options.context)
            report(f"{name} of {tokens}", replays)
            sequence(replays[0], len(replays[0]) // 2, LAYER)


if __name__ == "__main__":
    main()
