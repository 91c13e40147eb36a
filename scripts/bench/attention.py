"""Paged attention on one GPU: correctness, the same bits however a step is divided, and speed.

    python -m scripts.bench.attention --compile binaries   # needs no GPU
    python -m scripts.bench.attention --binaries binaries  # needs no compiler
    python -m scripts.bench.attention --only long --every-token  # with FP8 products

Times are medians over replays of a CUDA graph that runs the kernel once per layer, each layer with
its own keys and values, so that a replay reads more than the L2 cache holds. A step's limit is
that of reading its keys and values once, as fast as this card reads, or of its products.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.attention import FP8, World, mismatches
from support.fp8_attention import AllFp8World, Fp8World

from llmctl.plugins.backends.cuda.compiler import CompiledKernel, compile_kernel
from llmctl.plugins.backends.cuda.driver import cuda_driver
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.read_rate import device_read_rate, elapsed_ms
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.reference import reference
from scripts.bench.attention_rows import (
    CHECKED,
    CONTEXT,
    FP8_CONTEXT,
    GENERATION,
    LIKE_70B,
    LONG,
    MODELS,
    SMALL,
    TREES,
    covers,
)

PRODUCT_LIMIT = 989e12  # operations/s of an H100's or H200's products of 16-bit numbers, as sold
_binaries: dict[str, CompiledKernel] = {}


def main() -> None:
    """Compile, or check and time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", type=Path)
    parser.add_argument("--binaries", type=Path)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument(
        "--only", default="", help="time generation of one model, as 8B, or long, or trees"
    )
    parser.add_argument(
        "--every-token",
        action="store_true",
        help="time what engines launch in which every token has FP8 products",
    )
    arguments = parser.parse_args()
    of = AllFp8World if arguments.every_token else World
    if arguments.compile:
        worlds = [checked(i, "cpu") for i in range(len(CHECKED))] if of is World else []
        for world in [
            *worlds,
            *(timed(*row[:2], of) for row in (*GENERATION, *LONG, *CONTEXT) if covers(row, of)),
            Fp8World(**LIKE_70B, lengths=(64,)),
        ]:
            for spec in kernel.kernels(world.call([(0, 0, 1)]), world.limits()):
                _binaries[spec.name] = compile_kernel(spec)
        arguments.compile.write_bytes(pickle.dumps({k: describe(v) for k, v in _binaries.items()}))
        print(f"{len(_binaries)} kernels")
        return
    if arguments.binaries:
        for name, (metadata, cubin) in pickle.loads(arguments.binaries.read_bytes()).items():
            _binaries[name] = CompiledKernel.from_metadata(metadata, cubin)
    rate = device_read_rate()  # while all memory is free
    if rate is None:
        raise SystemExit("another program has this GPU's memory: end it and start again")
    if not arguments.skip_checks and of is World:
        check()
    measure(arguments.only, rate.bytes_per_s, of)


def describe(binary: CompiledKernel) -> tuple[dict[str, object], bytes]:
    """What a file keeps of a kernel."""
    return binary.metadata(), binary.cubin


def checked(index: int, device: str = "cuda") -> World:
    """One world of the correctness table."""
    return World(**{**SMALL, **CHECKED[index]}, device=device)


def timed(model: str, is_fp8: bool, of: type[World] = World) -> World:
    """What the timed kernels' specs follow from."""
    heads, kv_heads, size = MODELS[model]
    kv_dtype = FP8 if is_fp8 else torch.bfloat16
    return of(heads, kv_heads, size, (64,), kv_dtype=kv_dtype, quantize_out=is_fp8)


def loaded(launch: Launch) -> object:
    """The kernel on the device."""
    name = launch.spec.name
    if name not in _binaries:
        _binaries[name] = compile_kernel(launch.spec)
    if name not in _loaded:
        _loaded[name] = cuda_driver().load(_binaries[name])
    return _loaded[name]


_loaded: dict[str, object] = {}


def execute(launches: Sequence[Launch]) -> None:
    """Run launches on torch's current stream."""
    enqueue(launches)
    torch.cuda.synchronize()


def enqueue(launches: Sequence[Launch]) -> None:
    """Enqueue launches with programmatic dependence on each other."""
    stream = torch.cuda.current_stream().cuda_stream
    for launch in launches:
        cuda_driver().prepare(loaded(launch), launch.grid, launch.arguments, True)(stream)


def check() -> None:
    """Compare with the reference, and every way to cut a step with one chunk."""
    for index in range(len(CHECKED)):
        world = checked(index)
        parts = [(0, 0, world.lengths[0]), (1, world.lengths[1] - 3, 3)]
        found = torch.cat(world.run(parts, execute)).float()
        step, call = world.step(parts), world.call(parts)
        reference(call.inputs, call.outputs, call.attributes, step, world.cache)
        wanted = call.outputs["out"].float()
        error = ((found - wanted).norm() / wanted.norm()).item()
        wrong = mismatches(world, execute)
        print(f"check {CHECKED[index]}: error {error:.2e}, {len(wrong)} ways differ", flush=True)
        for line in wrong[:6]:
            print("   ", line)


def measure(only: str, read_rate: float, of: type[World]) -> None:
    """Time generation, trees and context chunks; of one model generation alone."""
    short = [row for row in GENERATION if only in ("", row[0])]
    rows = [*short, *(LONG if only in ("", "long") else ())]
    for model, is_fp8, batch, tokens, context in (row for row in rows if covers(row, of)):
        world = big(model, is_fp8, batch, context, of=of)
        name = f"{model} {'fp8 ' if is_fp8 else 'bf16'} batch {batch:3} tokens {tokens:2}"
        report(world, name, batch, tokens, context, read_rate)
    for model, is_fp8, batch, tokens, context in (
        TREES if only in ("", "trees") and of is World else ()
    ):
        world = big(model, is_fp8, batch, context)
        parents = [(index - 1) // 3 * 2 - 1 if index else -1 for index in range(tokens - 1)]
        world.trees = dict.fromkeys(range(batch), parents)
        name = f"{model} {'fp8 ' if is_fp8 else 'bf16'} batch {batch:3} trees of {tokens:2}"
        seconds = report(world, name, batch, tokens, context, read_rate)
        chain, _ = time_layers(
            replace(world, trees={}, scratch={}), [(r, context - 11, 11) for r in range(batch)]
        )
        print(f"    {seconds / chain:.2f} times chains of 11 ({chain * 1e6:.2f} us)", flush=True)
    for model, is_fp8, _, tokens, context in () if only or of is not World else CONTEXT:
        world = big(model, is_fp8, 1, context, layers=4)
        chunk(f"{model} {'fp8 ' if is_fp8 else 'bf16'}", world, tokens, context)
    for tokens, context in () if only else FP8_CONTEXT:
        of = {"lengths": (context,), "context_ends": {0: context}, "layers": 4, "device": "cuda"}
        world = Fp8World(**LIKE_70B, **of)
        chunk("70B FP8 products", world, tokens, context)


def chunk(name: str, world: World, tokens: int, context: int) -> None:
    parts = [(0, context - tokens, tokens)]
    seconds, low = time_layers(world, parts)
    print(
        f"{name} chunk {tokens} of {context}: {seconds * 1e6:.1f} us (min {low * 1e6:.1f}), "
        f"{operations(world, parts) / seconds / 1e12:.0f} TFLOP/s",
        flush=True,
    )


def report(
    world: World, name: str, batch: int, tokens: int, context: int, read_rate: float
) -> float:
    """Time requests of one length and print the share of both limits; seconds."""
    parts = [(r, context - tokens, tokens) for r in range(batch)]
    seconds, low = time_layers(world, parts)
    read = world.cache[0].nbytes * batch * context / padded(world)
    limits = {
        "reads": read / read_rate,
        "products": operations(world, parts) / PRODUCT_LIMIT,
    }
    shares = [f"{limit / seconds:.0%} of {of}" for of, limit in limits.items()]
    print(
        f"{name} context {context:6}: {seconds * 1e6:8.2f} us (min {low * 1e6:.2f}), "
        f"{read / seconds / 1e12:.2f} TB/s, {', '.join(shares)}, {kernels_of(world, parts)}",
        flush=True,
    )
    return seconds


def operations(world: World, parts: list[tuple[int, int, int]]) -> float:
    """Of the products of queries with keys and of weights with values."""
    pairs = sum(n * start + n * (n + 1) / 2 for _, start, n in parts)
    return 4 * world.heads * world.size * pairs


def kernels_of(world: World, parts: list[tuple[int, int, int]]) -> str:
    """The kernels of a step and their grids."""
    step = world.step(parts)
    found = kernel.launches(world.call(parts), world.env(step), world.shape(step))
    return ", ".join(f"{each.spec.name.split('.')[1]} {each.grid}" for each in found)


def padded(world: World) -> int:
    """Token slots of one layer's cache."""
    return world.cache.shape[1] * world.tokens_per_block


def big(
    model: str,
    is_fp8: bool,
    batch: int,
    context: int,
    layers: int = 0,
    of: type[World] = World,
) -> World:
    """Requests of one length: layers outgrow the L2 cache, and make little of a graph's start."""
    small = timed(model, is_fp8, of)
    per_layer = small.cache.element_size() * 2 * small.kv_heads * small.size * context * batch
    layers = layers or min(max(160_000_000 // per_layer, 16 if per_layer < 256e6 else 4), 64)
    lengths = (context,) * batch
    return replace(
        small, lengths=lengths, layers=layers, device="cuda", scratch={}, same_queries=True
    )


def time_layers(world: World, parts: list[tuple[int, int, int]]) -> tuple[float, float]:
    """Median and least seconds of one layer's attention."""
    step, first = world.step(parts), world.call(parts)
    env, shape = world.env(step), world.shape(step)

    def all_layers() -> None:
        for layer in range(world.layers):
            call = OpCall(
                first.op,
                first.name,
                first.inputs,
                first.outputs,
                {**first.attributes, "layer": layer},
            )
            enqueue(kernel.launches(call, env, shape))

    all_layers()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        all_layers()
    times = [ms * 1e-3 / world.layers for ms in elapsed_ms(graph.replay, 12)]
    return statistics.median(times[2:]), min(times)


if __name__ == "__main__":
    main()
