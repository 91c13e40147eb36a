"""Steps of one rank's part of a model, alone on one GPU: what ranks compute between meetings.

    python -m scripts.bench.slices 70b:2,4,8 8b:2,4,8 405b:8 [--tokens 1,11] [--context 1000]

A part has the model's layers with a rank's heads, KV heads, share of the MLP and of the vocabulary,
random weights, and every operator in a launch of its own, as ranks have them; its sums are its own.
Prints the least ms of a step in a CUDA graph, what a plain read of its bytes takes, and what a
layer waits beside that (`LAYER_WAITS` in cli/rank_speed.py).
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from statistics import median

import torch

from llmctl.builder.config import BuildRequest
from llmctl.builder.ranks import local_kv_heads, row_share
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from scripts.bench.layers_support import CONTEXT, Model
from scripts.bench.rows import weight_bytes
from scripts.models.planted_shapes import SHAPES, Shape


def slice_of(shape: Shape, ranks: int) -> Shape:
    """What one of so many ranks computes."""
    return replace(
        shape,
        intermediate=shape.intermediate // ranks,
        heads=shape.heads // ranks,
        kv_heads=local_kv_heads(shape.kv_heads, ranks),
        vocab=row_share(shape.vocab, ranks),
        bos=0,
        eos=(1,),
    )


def parse(text: str) -> tuple[str, list[int]]:
    """ "70b:2,4" -> ("70b", [2, 4])."""
    name, _, ranks = text.partition(":")
    if name not in SHAPES or not ranks:
        raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(SHAPES)} and ranks are wanted")
    return name, [int(count) for count in ranks.split(",")]


def measure(name: str, ranks: int, tokens: list[int], context: int, bandwidth: float) -> None:
    """Print the steps of one slice. bandwidth: TB/s."""
    shape = slice_of(SHAPES[name], ranks)
    # Every token of a step gets logits, as those of a verification do.
    request = BuildRequest(max_batch_size=4, max_seq_len=CONTEXT, max_draft_len=max(tokens) - 1)
    model = Model(shape, request=request)
    num_bytes = weight_bytes(model.plan) + context * model.cache.numel() // model.context
    read_ms = num_bytes / bandwidth / 1e9
    for count in tokens:
        ms = min(model.milliseconds(context, one_launch=False, tokens=count, rows=count))
        wait_us = 1e3 * (ms - read_ms) / shape.layers
        print(
            f"{name}, a rank of {ranks}, {count} tokens at {context}: {ms:.4f} ms, a read of "
            f"{num_bytes / 1e9:.3f} GB {read_ms:.4f}; a layer reads "
            f"{num_bytes / shape.layers / 1e6:.1f} MB and waits {wait_us:.2f} us",
            flush=True,
        )


def main() -> None:
    """Slice after slice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("slices", nargs="+", type=parse, metavar="SHAPE:RANKS")
    parser.add_argument("--tokens", default="1,11")
    parser.add_argument("--context", type=int, default=1000)
    arguments = parser.parse_args()
    bandwidth = median(read_bandwidth())
    print(f"{torch.cuda.get_device_name()}, a plain read: {bandwidth:.3f} TB/s", flush=True)
    tokens = [int(count) for count in arguments.tokens.split(",")]
    for name, counts in arguments.slices:
        for ranks in counts:
            measure(name, ranks, tokens, arguments.context, bandwidth)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
