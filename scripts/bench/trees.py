"""What the parts of a device round with Medusa heads take, and verifying trees beside a chain.

    python -m scripts.bench.trees --engine DIR [--contexts 1000,8000] [--batch 1] [--output DIR]

DIR is an engine with Medusa heads and room for 63 drafts (scripts/bench/build_engines makes
70b-medusa and 8b-medusa). Each part is a CUDA graph as rounds capture it, replayed. Rows, each with
minimum, median and maximum over the replays:

  tree-*-heads     ms of the heads alone, on the rows of the last step
  tree-*-drafts    ms of drafting: the heads, and their likeliest tokens in the tree
  tree-*-accept    ms of acceptance and the moves of keys, alone
  tree-*-verify-N  ms of verifying N tokens of a request, with acceptance and moves: chains of 11,
                   trees of 21 and 64 (the first nodes of mc_sim_7b_63); and % over the chain

The part of a round outside verification as a client sees it is the row heads-*-outside-verify of
scripts/bench/cuda.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from llmctl.builder.engine_format import MEDUSA_GRAPH, parse_choices
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth, warm_up
from llmctl.plugins.device_loop import tree_kernel
from llmctl.plugins.device_loop.state import RoundState
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.device import DeviceMedusa
from llmctl.runtime.engines.graphs import capture_graph, kv_bucket
from llmctl.runtime.engines.open_cuda import plan_engines
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.upload import Drawing
from llmctl.runtime.rounds.verification import enqueue_tree_verification, enqueue_verification
from scripts.bench.rows import Table, row, weight_bytes

CHAIN, TREES = 10, (20, 63)  # drafts
REPLAYS = 60


class Rounds:
    """An engine, its request state, and the parts of a round on it."""

    def __init__(self, folder: Path, batch: int, longest: int) -> None:
        room = batch * (longest + 2 * REPLAYS * 4 + 256)
        loaded = plan_engines({"target": folder}, max_tokens=room).load()
        self.target, self.batch = loaded.target, batch
        self.queue = self.target.queue
        blocks = -(-room // self.target.tokens_per_block)
        self.target.allocate_kv_cache(blocks)
        most, requests = self.target.max_draft_len, self.target.max_batch_size
        with self.queue.scope():
            state = RoundState.allocate(requests, most, self.queue.device)
            tree = parse_choices("mc_sim_7b_63")
            self.drafter = DeviceMedusa(self.target, tree, most, HiddenRows())
            trees = self.drafter.make_trees(requests, most, self.queue.device)
            self.steps = DeviceSteps([self.target], self.queue, state, trees)
            self.drafter.bind(self.steps)
            table = torch.arange(blocks, dtype=torch.int32, device=self.queue.device)
            own = table[: blocks // batch * batch].view(batch, -1)
            tables = self.target.program.step.block_tables
            width = min(own.shape[1], tables.shape[1])
            tables[:batch, :width] = own[:, :width]
            state.capacity[:batch] = width * self.target.tokens_per_block
            state.max_len[:batch] = self.target.max_seq_len
            state.root[:batch], state.previous[:batch] = 3, 5
        self.state, self.trees = state, trees

    def shape(self, context: int, draft_len: int) -> RoundShape:
        """Of greedy rounds."""
        longest = kv_bucket(context + 2 * REPLAYS, self.target.program.limits)
        return RoundShape(self.batch, longest, Drawing.GREEDY, draft_len)

    def replay_ms(self, record: Callable[[], None], context: int) -> list[float]:
        """What is recorded, as a graph, with sequences of about so many tokens."""

        def rewind() -> None:
            self.state.committed[: self.batch] = context

        with self.queue.scope():
            rewind()
            record()
            graph = capture_graph(self.queue, record)
            warm_up(graph.replay, 0.1)
            pairs = []
            for _ in range(REPLAYS):  # none is waited for: the device does not wait for the host
                rewind()
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                graph.replay()
                ended.record()
                pairs.append((began, ended))
            torch.cuda.synchronize()
            return [began.elapsed_time(ended) for began, ended in pairs]

    def accept(self, shape: RoundShape) -> None:
        """Acceptance, and the moves that it lists."""
        limits, step = self.target.program.limits, self.target.program.step
        sizes = shape.batch, shape.draft_len
        launch = tree_kernel.accept_tree(self.state, self.trees, step, limits, *sizes)
        self.steps.launch(self.target, [launch])
        self.target.enqueue_moves(self.trees.starts[: shape.batch + 1], self.trees.moves)


def measure(rounds: Rounds, name: str, context: int, bandwidth: float, table: Table) -> None:
    """All rows of one context."""
    label = f"tree-{name}-b{rounds.batch}-{context}"
    most = rounds.shape(context, max(TREES))
    floor = 1e3 * weight_bytes(rounds.target.plan, MEDUSA_GRAPH) / bandwidth
    heads = rounds.replay_ms(
        lambda: rounds.target.enqueue_head(MEDUSA_GRAPH, rounds.batch), context
    )
    drafts = rounds.replay_ms(lambda: rounds.drafter.enqueue_drafts(most), context)
    table.add(
        row(f"{label}-heads", "ms", heads, floor),
        row(f"{label}-drafts", "ms", drafts, floor),
        row(f"{label}-accept", "ms", rounds.replay_ms(lambda: rounds.accept(most), context)),
    )
    shape = rounds.shape(context, CHAIN)
    chain = rounds.replay_ms(lambda: enqueue_verification(rounds.steps, None, shape), context)
    table.add(row(f"{label}-verify-chain-{CHAIN + 1}", "ms", chain))
    for count in TREES:
        shape = rounds.shape(context, count)

        def verify(shape: RoundShape = shape) -> None:
            enqueue_tree_verification(rounds.steps, rounds.drafter.branches, shape)

        times = rounds.replay_ms(verify, context)
        growth = [100 * (each / median(chain) - 1) for each in times]
        table.add(
            row(f"{label}-verify-tree-{count + 1}", "ms", times),
            row(f"{label}-verify-tree-{count + 1}-growth", "%", growth, note="over the chain"),
        )


def main() -> None:
    """Parse, measure, store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--contexts", default="1000,3000")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for <device>.jsonl and <device>.md")
    options = parser.parse_args()
    contexts = list(map(int, options.contexts.split(",")))
    reads = read_bandwidth()
    torch.cuda.empty_cache()
    rounds = Rounds(options.engine, options.batch, max(contexts))
    table = Table(options.output)
    for context in contexts:
        measure(rounds, options.engine.name, context, median(reads) * 1e12, table)


if __name__ == "__main__":
    main()
