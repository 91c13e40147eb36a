"""Times the kernels between the matrix products, in CUDA graphs of programmatic launches.

    python -m scripts.bench.small_kernels [--vocab 128256] [--hidden 8192]

One line per kernel and number of rows: microseconds a launch, median and range over replays. A
launch waits for the one before it, as in a model, so this is latency and not throughput. Of the
sums over ranks, here all in one memory, and of the logits that trees grow from, also the share of
its bandwidth that their bytes take.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    Launch,
    LaunchEnv,
    StepLimits,
    StepShape,
    step_shapes,
)
from llmctl.plugins.backends.cuda.read_rate import elapsed_ms, read_bandwidth
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.op_rules import RANK_COUNTS
from llmctl.plugins.device_loop import kernel as rounds
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.all_gather import kernel as all_gather
from llmctl.plugins.ops.all_reduce import kernel as all_reduce
from llmctl.plugins.ops.rms_norm.kernel import launches as norm_launches
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingArrays, SamplingScratch
from llmctl.plugins.ops.tree_growth import kernel as growth
from llmctl.plugins.ops.tree_growth.arrays import GrowthArrays, TreeShape

REPEATS = 50  # launches of a graph
REPLAYS = 25
ROWS = (1, 11, 176)
PREFERENCES = {
    "greedy": {"greedy": 1},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}


# (offers of a draft, drafts of a level that are followed, levels), drafts
TREES = (
    (TreeShape(2, 1, 12), 24),
    (TreeShape(3, 3, 6), 16),
    (TreeShape(10, 10, 8), 32),
)


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cuda")


def make_step(limits: StepLimits) -> DeviceStep:
    return DeviceStep(**{name: integers(*shape) for name, shape in step_shapes(limits).items()})


def measure(launches: Sequence[Launch]) -> tuple[float, float, float]:
    """Minimum, median and maximum microseconds of one run of the launches."""
    driver = cuda_driver()
    prepared = [
        driver.prepare(driver.load(compile_kernel(x.spec)), x.grid, x.arguments, True)
        for x in launches
    ]

    def record() -> None:
        for _ in range(REPEATS):
            for start in prepared:
                start(torch.cuda.current_stream().cuda_stream)

    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    times = [1e3 * ms / REPEATS for ms in elapsed_ms(graph.replay, REPLAYS)[3:]]
    return min(times), statistics.median(times), max(times)


def report(what: str, rows: int, launches: Sequence[Launch], share_us: float = 0.0) -> None:
    """share_us: how long the bytes take at the memory's bandwidth; 0: not told."""
    least, median, most = measure(launches)
    share = f"{share_us / median:>9.1%}" if share_us else ""
    print(f"{what:<44}{rows:>5}{median:>9.2f}{least:>9.2f}{most:>9.2f}{share}", flush=True)


def norm(rows: int, hidden: int) -> list[Launch]:
    x, residual, weight = (
        torch.randn(shape, device="cuda").bfloat16()
        for shape in ((rows, hidden), (rows, hidden), (hidden,))
    )
    out = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.tensor([0.01], device="cuda")
    inputs = {"x": x, "weight": weight, "residual": residual, "scale": scale}
    outputs = {"out": out, "residual_out": torch.empty_like(residual)}
    call = OpCall("rms_norm", "norm", inputs, outputs, {"epsilon": 1e-5})
    limits = StepLimits(rows, rows, rows, 4096, 10, 32, "bfloat16")
    env = LaunchEnv(make_step(limits), integers(1), limits, "tokens", zeroed)
    return norm_launches(call, env, StepShape(rows, rows, rows, 1, 1))


def time_ranks(hidden: int, vocab: int) -> None:
    """What ranks exchange: sums behind O and down products, and logits."""
    bandwidth = statistics.median(read_bandwidth()) * 1e12  # bytes a second
    for ranks in RANK_COUNTS[1:]:
        for rows in ROWS:
            for what, launches, num_bytes in (
                ("all_reduce", *sums(ranks, rows, hidden)),
                ("all_gather", *columns(ranks, rows, vocab)),
            ):
                name = f"{what}, {ranks} ranks, share of bandwidth"
                report(name, rows, launches, 1e6 * num_bytes / bandwidth)


def sums(ranks: int, rows: int, hidden: int) -> tuple[list[Launch], int]:
    """(the launch of one rank, the bytes that it moves)."""
    parts = torch.randn(ranks, rows, hidden, device="cuda")
    inputs = {
        "x": parts[0],
        "weight_scale": torch.rand(hidden, device="cuda"),
        "x_scale": torch.tensor([0.01], device="cuda"),
    }
    out = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
    call = OpCall("all_reduce", "sum", inputs, {"out": out}, {"ranks": ranks})
    num_bytes = parts.nbytes + out.nbytes + inputs["weight_scale"].nbytes
    return of_ranks(all_reduce.launches, call, parts), num_bytes


def columns(ranks: int, rows: int, vocab: int) -> tuple[list[Launch], int]:
    """(the launch of rank 0, the bytes that it moves)."""
    share = -(-vocab // (64 * ranks)) * 64
    parts = torch.randn(ranks, rows, share, device="cuda")
    out = torch.empty(rows, vocab, device="cuda")
    call = OpCall("all_gather", "gather", {"x": parts[0]}, {"out": out}, {"ranks": ranks})
    return of_ranks(all_gather.launches, call, parts), 2 * out.nbytes


def of_ranks(
    launches: Callable[[OpCall, LaunchEnv, StepShape], list[Launch]],
    call: OpCall,
    parts: torch.Tensor,
) -> list[Launch]:
    rows = parts.shape[1]
    limits = StepLimits(rows, rows, rows, 4096, 10, 32, "bfloat16")
    env = LaunchEnv(
        make_step(limits),
        integers(1),
        limits,
        "tokens",
        zeroed,
        parts=lambda x, ranks: tuple(parts),
    )
    return launches(call, env, StepShape(rows, rows, rows, 1, 1))


def zeroed(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What merging the best ids of ranks, which is not timed here, asks for beside gathering."""
    return torch.zeros(shape, dtype=dtype, device="cuda")


def arrays(rows: int, **preferences: float) -> SamplingArrays:
    made = SamplingArrays.allocate(rows, "cuda")
    made.greedy.zero_()
    made.seed_low.copy_(torch.arange(rows))
    for name, value in preferences.items():
        getattr(made, name).fill_(value)
    return made


def time_sampling(vocab: int) -> None:
    for name, spread in (("flat", 1.0), ("peaked", 4.0)):
        logits = torch.randn(max(ROWS), vocab, device="cuda") * spread
        scratch = SamplingScratch.allocate(max(ROWS), vocab, "cuda")
        positions, out = integers(max(ROWS)), integers(max(ROWS))
        if name == "flat":
            for rows in ROWS:
                report("argmax", rows, [sampling.argmax(logits, out, scratch, rows)])
        for what, preferences in PREFERENCES.items():
            for rows in ROWS:
                made = arrays(rows, **preferences)
                is_wide = "top_k" not in preferences and bool({"top_p", "min_p"} & set(preferences))
                drawn = DrawnRows(rows, made, positions)
                launches = sampling.sample(logits, out, scratch, drawn, has_wide=is_wide)
                report(f"sample {name}, {what}", rows, launches)


def time_rounds(vocab: int) -> None:
    for batch in (1, 8, 64):
        draft_len = 10
        state = RoundState.allocate(batch, draft_len, "cuda")
        for tensor in (state.committed, state.capacity, state.max_len):
            tensor.fill_(2000)
        tokens = batch * (draft_len + 1)
        limits = StepLimits(tokens, tokens, batch, 4096, draft_len, 32, "bfloat16")
        step = make_step(limits)
        steps = {
            "draft_first": rounds.draft_first(state, step, limits, batch),
            "draft_next": rounds.draft_next(state, step, limits, batch, 1),
            "verify": rounds.verify(state, step, limits, batch, draft_len),
            "accept": rounds.accept(state, batch, draft_len),
        }
        for name, launch in steps.items():
            report(f"rounds.{name}, requests:", batch, [launch])
        logits = torch.randn(batch, vocab, device="cuda")
        scratch = SamplingScratch.allocate(batch, vocab, "cuda")
        drawn = sampling.argmax(logits, state.drafts, scratch, batch, stride=draft_len)
        report("argmax, rounds.draft_next, requests:", batch, [drawn, steps["draft_next"]])
        both = rounds.draw_next(logits, scratch, state, step, limits, batch, 1)
        report("rounds.draw_next, requests:", batch, [both])


def time_growth(vocab: int) -> None:
    """What is between two levels of trees that a draft engine or an EAGLE head grows."""
    bandwidth = statistics.median(read_bandwidth()) * 1e12  # bytes a second
    for shape, draft_len in TREES:
        for batch in (1, 8):
            state = RoundState.allocate(batch, draft_len, "cuda")
            trees = DraftTrees.allocate(batch, draft_len, "cuda")
            grown = GrowthArrays.allocate(batch, draft_len, shape, vocab, "cuda")
            state.committed.fill_(2000)
            for tensor in (state.capacity, state.max_len):
                tensor.fill_(4000)
            tokens = batch * (draft_len + 1)
            limits = StepLimits(tokens, tokens, batch, 4096, draft_len, 32, "bfloat16")
            rows = batch * shape.width
            logits = torch.randn(rows, vocab, device="cuda")
            described = grown, state, trees, make_step(limits), limits, batch, draft_len
            launches = []
            for level in (0, 1):
                offered = growth.offer(
                    logits, grown, rows if level else batch, is_root=not level, num_ids=vocab
                )
                launches = [*offered, growth.grow(*described, level, of_pairs=False)]
                measure(launches)  # which makes the trees
            name = f"growth {shape.num_offers},{shape.width} of {draft_len}"
            share_us = 1e6 * logits.nbytes / bandwidth
            report(f"{name}, offer, share of bandwidth", rows, launches[:1], share_us)
            report(f"{name}, pick", rows, launches[1:2])
            report(f"{name}, grow", batch, launches[2:])
            report(f"{name}, all of a level", batch, launches, share_us)
            report(f"{name}, list_moves", batch, [growth.list_moves(*described)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=8192)
    options = parser.parse_args()
    print(f"{'kernel':<44}{'rows':>5}{'us':>9}{'min':>9}{'max':>9}")
    for rows in ROWS:
        (launch,) = norm(rows, options.hidden)
        report(f"rms_norm {options.hidden}, residual, FP8", rows, [launch])
        for num_warps in (8, 16):
            other = replace(launch, spec=replace(launch.spec, num_warps=num_warps))
            report(f"  with {num_warps} warps", rows, [other])
    time_ranks(options.hidden, options.vocab)
    time_rounds(options.vocab)
    time_growth(options.vocab)
    time_sampling(options.vocab)


if __name__ == "__main__":
    main()
