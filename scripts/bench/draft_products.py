"""Times the graph of a draft head, and finds the tactics of its products.

    python -m scripts.bench.draft_products --engine DIR --graph redrafter.next [--rows 4] [--sweep]

DIR is an engine with heads (scripts/bench/build_engines). The graph runs STEPS times in a CUDA
graph, as in a round, over rows of zeros: the least ms of a run, beside what a plain read of its
weights takes. --sweep tries the variants of one product after another, the largest first, and
prints entries for packed_linear's tactics.json. Ends with 1 where logits differ, which must not
happen.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median

import torch

from llmctl.plugins.backends.cuda.program import CudaProgram
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.core.calls import OpCall
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.graphs import capture_graph
from llmctl.runtime.engines.heads import find_head
from llmctl.runtime.engines.open_cuda import plan_engines
from scripts.bench.layers_support import CompiledWhenLaunched
from scripts.bench.product_variants import sweep
from scripts.bench.rows import weight_bytes

STEPS, REPLAYS = 5, 12  # runs of the head in a graph, and how often that is timed


class Graph:
    """One head of an engine, its kernels compiled when they are launched."""

    def __init__(self, folder: Path, name: str) -> None:
        self.engine: CudaEngine = plan_engines({"target": folder}, max_tokens=1024).load().target
        self.engine.allocate_kv_cache(1024 // self.engine.tokens_per_block)
        self.name = name
        self.head, found = find_head(self.engine._heads, name)
        assert isinstance(found, CudaProgram)
        self.program = found
        self.program._kernels.__class__ = CompiledWhenLaunched
        step = self.engine.prepare_head(name)
        with self.engine.queue.scope():
            step.token_ids.copy_(torch.arange(len(step.token_ids), device="cuda") + 7)

    def products(self) -> list[list[OpCall]]:
        """The packed products by shape, the largest first."""
        calls = [call for call in self.head.calls if call.op.startswith("packed_linear")]

        def shape(call: OpCall) -> tuple[int, str]:
            return -call.inputs["weight"].nbytes, str(call.inputs["weight"].shape)

        return [list(same) for _, same in groupby(sorted(calls, key=shape), shape)]

    def time(self, rows: int) -> tuple[float, torch.Tensor]:
        """Least ms of a run, and its logits."""
        engine = self.engine
        self.program.forget()

        def record() -> None:
            for _ in range(STEPS):
                engine.enqueue_head(self.name, rows, reads_tokens=True)

        with engine.queue.scope():
            record()
            torch.cuda.synchronize()
            graph = capture_graph(engine.queue, record)
            times = []
            for _ in range(REPLAYS):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                graph.replay()
                ended.record()
                ended.synchronize()
                times.append(began.elapsed_time(ended) / STEPS)
            return min(times), engine.head_output(self.name, "logits")[:rows].clone()


def main() -> None:
    """Time, and sweep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--graph", required=True, help="such as redrafter.next")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--sweep", action="store_true", help="look for better tactics")
    options = parser.parse_args()
    bandwidth = median(read_bandwidth())
    torch.cuda.empty_cache()
    graph = Graph(options.engine, options.graph)
    floor = weight_bytes(graph.engine.plan, options.graph) / bandwidth / 1e9
    print(f"{torch.cuda.get_device_name()}: plain read {bandwidth:.3f} TB/s", flush=True)

    def report() -> None:
        ms, _ = graph.time(options.rows)
        share = f"{floor / ms:.1%} of a read"
        print(f"{options.graph}, {options.rows} rows: {ms:.4f} ms, {share}", flush=True)

    report()
    is_same = True
    for calls in graph.products() if options.sweep else []:
        print(f"  {calls[0].name}: {tuple(calls[0].inputs['weight'].shape)}", flush=True)
        timing = partial(graph.time, options.rows)
        is_same &= sweep(calls, options.rows, graph.program.limits, timing)
    if options.sweep:
        report()
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
