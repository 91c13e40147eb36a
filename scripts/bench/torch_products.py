"""Times the FP8 products of a layer as torch has them (cuBLASLt), beside the packed ones.

    python -m scripts.bench.torch_products [--model 8b] [--tokens 120,128]

For each product alone, and for the four of a layer one after the other: microseconds in a graph
over layers that together are larger than L2, medians of turns in which all ways are timed. Torch's
ways: one scale a tensor or one a row, sums in float32 now and then or ("fast") kept in the tensor
cores, which hold fewer bits. Its products have none of what ours do at their ends: SwiGLU,
rotation, the cache, FP8.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear import kernel as product
from scripts.bench.gemm_prefill import graph_us
from scripts.bench.gemm_support import MODELS, Bench, layer

LAYERS = 8
TURNS = 5
PRODUCTS = ("QKV", "output", "gate and up", "down")
Work = Callable[[], object]


def torch_product(call: OpCall, tokens: int, *, by_row: bool, is_fast: bool) -> Work:
    """torch's product of the sizes of a call, with its numbers in another order."""
    x, packed = call.inputs["x"][:tokens], call.inputs["weight"]
    weight = packed.view(-1, x.shape[1])
    sizes = ((tokens, 1), (1, len(weight))) if by_row else ((), ())
    scales = [torch.full(size, 1e-3, device="cuda") for size in sizes]
    return partial(
        torch._scaled_mm, x, weight.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def packed_product(bench: Bench, call: OpCall, tokens: int) -> list[Work]:
    """The launches of an engine's product."""
    launches = product.launches(call, bench.env, StepShape(tokens, 1, tokens, tokens, tokens))
    return [partial(bench.prepare(each), bench.stream.cuda_stream) for each in launches]


def ways_of(bench: Bench, calls: list[OpCall], tokens: int) -> dict[str, list[Work]]:
    """How each of some calls can be computed, by a name of the way."""
    ways = {"packed": [work for call in calls for work in packed_product(bench, call, tokens)]}
    for by_row, is_fast in itertools.product((False, True), (True, False)):
        name = f"torch, a scale a {'row' if by_row else 'tensor'}" + ", fast" * is_fast
        with torch.cuda.stream(bench.stream):
            found = [torch_product(call, tokens, by_row=by_row, is_fast=is_fast) for call in calls]
            try:
                found[0]()
            except RuntimeError as error:  # of a way that this build of torch does not have
                print(f"{name}: {str(error).splitlines()[0]}")
                continue
        ways[name] = found
    return ways


def time_all(bench: Bench, what: str, calls: list[OpCall], tokens: int) -> None:
    """A row per way: microseconds a layer, median, least and most of the turns."""
    ways = ways_of(bench, calls, tokens)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways] * TURNS:
        us = graph_us(bench.stream, ways[name]) * len(ways[name]) / LAYERS
        times[name].append(us)
    for name, its in times.items():
        told = f"{median(its):7.2f} us ({min(its):.2f} to {max(its):.2f})"
        print(f"{tokens} tokens, {what}, {name}: {told}", flush=True)


def main() -> None:
    """Parse options and time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--tokens", default="120,128")
    options = parser.parse_args()
    rate = median(read_bandwidth())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: plain read {rate:.3f} TB/s")
    bench = Bench()
    layers = [layer(bench, MODELS[options.model]) for _ in range(LAYERS)]
    for tokens in map(int, options.tokens.split(",")):
        time_all(bench, "all four", [call for each in layers for call in each], tokens)
        for index, what in enumerate(PRODUCTS):
            calls = [each[index] for each in layers]
            bound = calls[0].inputs["weight"].nbytes / rate / 1e6
            time_all(bench, f"{what} (weights alone {bound:.1f} us)", calls, tokens)


if __name__ == "__main__":
    main()
