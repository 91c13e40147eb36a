"""Times the packed products of many tokens on a GPU.

    python -m scripts.bench.gemm_prefill [--tokens 128,512,2048] [--models 70b,8b]
    python -m scripts.bench.gemm_prefill --models 8b --dtypes mxfp4

Times are medians of a graph's replays, beside torch._scaled_mm or torch.matmul for the same sizes.
torch._scaled_mm adds in float32 now and then, as the packed products do, or ("fast") keeps a sum in
the tensor cores, which hold fewer bits of it. mxfp4 is what comes before such a product where
weights are 4-bit: writing the weight in FP8, beside what a plain read of as many bytes takes.
Bits are compared elsewhere (tests/gpu/test_packed_linear_exact.py).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.backends.cuda.read_rate import elapsed_ms, read_bandwidth, warm_up
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.expansion import expand_launch, expanded_call
from llmctl.plugins.ops.packed_linear.prefill import Variant, choose, prefill_launch, variants_of
from llmctl.plugins.schemes.table import SCHEMES
from scripts.bench import gemm_support
from scripts.bench.gemm_support import FP8, Bench

WARM_UP_S = 0.03  # a GPU that was idle takes some milliseconds to reach its clock
SHAPES = {
    "70b": [
        ("qkv", 10240, 8192),
        ("o", 8192, 8192),
        ("gate", 57344, 8192),
        ("swiglu", 57344, 8192),
        ("down", 8192, 28672),
    ],
    "8b": [
        ("qkv", 6144, 4096),
        ("o", 4096, 4096),
        ("gate", 28672, 4096),
        ("swiglu", 28672, 4096),
        ("down", 4096, 14336),
    ],
}


def multiply_by_library(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, is_fast: bool
) -> None:
    """torch's product x [tokens, K] * weight [rows, K]; is_fast: of FP8, without float32 sums."""
    if x.dtype == FP8:
        bf16 = torch.bfloat16
        torch._scaled_mm(x, weight.T, scale, scale, out_dtype=bf16, use_fast_accum=is_fast)
    else:
        torch.matmul(x, weight.T)


def library_us(
    bench: Bench, calls: list[OpCall], rows: list[int], tokens: int, *, is_fast: bool
) -> float:
    """Median microseconds of torch's products of the sizes of these calls, one after the other."""
    work, one = [], torch.ones((), device="cuda")
    for call, its_rows in zip(calls, rows, strict=True):
        x = call.inputs["x"][:tokens]
        size = its_rows * x.shape[1]
        weight = call.inputs["weight"].view(-1)[:size].view(its_rows, -1)  # any numbers
        work.append(partial(multiply_by_library, x, weight, one, is_fast=is_fast))
    return len(work) * graph_us(bench.stream, work * 3)


def graph_us(stream: torch.cuda.Stream, work: list, repeats: int = 7) -> float:
    """Median microseconds per piece of work, in a replayed graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for enqueue in work:
            enqueue()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for enqueue in work:
                enqueue()
        warm_up(graph.replay, WARM_UP_S)
        return median(elapsed_ms(graph.replay, repeats)) * 1000 / len(work)


def time_model(
    bench: Bench, name: str, dtype: str, counts: list[int], variants: list[Variant]
) -> None:
    """A row per product and number of tokens: TFLOP/s of every variant and of the library."""
    for what, rows, inner in SHAPES[name]:
        if what == "swiglu" and dtype != "fp8":
            continue
        op = "packed_linear_swiglu" if what == "swiglu" else "packed_linear"
        call = bench.call(op, rows, inner, dtype)
        shapes = variants or variants_of(call)
        bench.compile([prefill_launch(call, bench.env, 128, variant) for variant in shapes])
        for tokens in counts:
            flop = 2 * tokens * rows * inner
            cells = []
            for variant in shapes:
                prepared = bench.prepare(prefill_launch(call, bench.env, tokens, variant))
                stream = bench.stream.cuda_stream
                us = graph_us(bench.stream, [lambda p=prepared, s=stream: p(s)] * 3)
                cells.append(f"{variant.name} {us:8.1f} us {flop / us / 1e6:6.0f}")
            for is_fast in (False, True) if dtype == "fp8" else (False,):
                us = library_us(bench, [call], [rows], tokens, is_fast=is_fast)
                cells.append(f"torch{' fast' * is_fast} {us:8.1f} us {flop / us / 1e6:6.0f}")
            chosen = choose(call, tokens, 132).name
            print(f"{name} {dtype} {what} M={tokens}: " + " | ".join(cells), chosen, flush=True)
        del call
        torch.cuda.empty_cache()


def time_expansion(bench: Bench, name: str, scheme: str, read: float) -> None:
    """A row per weight: microseconds of expanding it, and the share of the read limit."""
    for what, rows, inner in SHAPES[name]:
        if what == "swiglu":
            continue
        call = bench.call("packed_linear", rows, inner, scheme)
        expanded = expanded_call(call, bench.scratch)
        launch = expand_launch(call, expanded)
        prepared, stream = bench.prepare(launch), bench.stream.cuda_stream
        us = graph_us(bench.stream, [lambda p=prepared, s=stream: p(s)] * 3)
        moved = call.inputs["weight"].nbytes + expanded.inputs["weight"].nbytes
        share = moved / us / 1e6 / read
        told = f"{us:.1f} us for {moved / 1e6:.0f} MB, {share:.1%} of a read"
        print(f"{name} {scheme} {what}: {told}")
        del call, expanded
        bench.scratches.clear()
        torch.cuda.empty_cache()


def time_layer(bench: Bench, name: str, counts: list[int]) -> None:
    """A row per number of tokens: a layer's FP8 products one after the other, and the library's."""
    shapes = [shape for shape in SHAPES[name] if shape[0] != "gate"]
    calls = [
        bench.call("packed_linear_swiglu" if what == "swiglu" else "packed_linear", rows, inner)
        for what, rows, inner in shapes
    ]
    for tokens in counts:
        bench.compile([prefill_launch(call, bench.env, tokens) for call in calls])
        prepared = [bench.prepare(prefill_launch(call, bench.env, tokens)) for call in calls]
        stream = bench.stream.cuda_stream
        us = 4 * graph_us(bench.stream, [lambda p=p, s=stream: p(s) for p in prepared] * 3)
        all_rows = [rows for _, rows, _ in shapes]
        exact, fast = (
            library_us(bench, calls, all_rows, tokens, is_fast=is_fast) for is_fast in (False, True)
        )
        flop = sum(2 * tokens * rows * inner for _, rows, inner in shapes)
        rates = [
            f"{what} {taken:.1f} us {flop / taken / 1e6:.0f}"
            for what, taken in (("packed", us), ("torch", exact), ("torch fast", fast))
        ]
        print(f"{name} fp8 layer M={tokens}, TFLOP/s: {' | '.join(rates)}", flush=True)


def parse_variant(text: str) -> Variant:
    """Variant of "row tiles a warpgroup,tokens,a stages,b stages"."""
    return Variant(*map(int, text.split(",")))


def main() -> None:
    """Parse options; check; time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="70b")
    parser.add_argument("--tokens", default="128,256,512,1024,2048,4096")
    parser.add_argument("--dtypes", default="fp8,bfloat16")
    parser.add_argument("--variant", action="append", default=[], help=parse_variant.__doc__)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    counts = [int(count) for count in options.tokens.split(",") if count]
    most = gemm_support.MAX_TOKENS = max(128, *counts)
    bench = Bench()
    variants = [parse_variant(text) for text in options.variant]
    bench.env = replace(bench.env, limits=StepLimits(most, most, 16, most, 16, 32, "bfloat16"))
    for name in filter(None, options.models.split(",")):
        if "fp8" in options.dtypes:
            time_layer(bench, name, counts)
        for dtype in options.dtypes.split(","):
            if dtype in SCHEMES and SCHEMES[dtype].forms[0].is_coded:
                time_expansion(bench, name, dtype, median(read_bandwidth()))
            else:
                time_model(bench, name, dtype, counts, variants)


if __name__ == "__main__":
    main()
