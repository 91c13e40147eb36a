"""Columns of ranks with a GPU each, by the kernel's own source on a CPU: what is gathered has the
bits of the reference on every rank, in 16 and 32 bits."""

from __future__ import annotations

import random
import time

import pytest
import torch
from support.emulated_peers import THREADS, compile_peers
from support.peer_buffers import Buffers, optional, pointer, run_ranks, same

from llmctl.plugins.ops.all_gather.reference import gather_ranks

OWN, MOST_ROWS, LAUNCHES, MAX_BLOCKS = 32, 7, 24, 4
NOTHING_AFTER = optional({}, "weight_scale", "x_scale", "bias")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("kind", "padding"), [("BF16", 0), ("BF16", 13), ("FP32", 0)])
def test_what_operators_read_is_gathered_in_every_rank(ranks: int, kind: str, padding: int) -> None:
    """Whole vectors where there is no padding, and numbers of 16 bits, of which two make a word;
    one of all ones, in all its halves, stays a NaN."""
    columns = ranks * OWN - padding
    library = compile_peers(RANKS=ranks, LEAVES=1, WIDTH=OWN, GATHER=1, OUT_WIDTH=columns,
                            OUT_TYPE=kind)  # fmt: skip
    dtype = {"BF16": torch.bfloat16, "FP32": torch.float32}[kind]
    buffers, draw = Buffers(ranks, MOST_ROWS * OWN * dtype.itemsize), random.Random(ranks)
    launches = []
    for seed in range(LAUNCHES):
        generator, rows = torch.Generator().manual_seed(seed), draw.choice((1, 2, MOST_ROWS))
        parts = torch.randn((ranks, rows, OWN), generator=generator).to(dtype)
        parts[draw.randrange(ranks), :, 3:6] = torch.tensor([0.0, -0.0, torch.nan]).to(dtype)
        parts[draw.randrange(ranks), 0, 8:12].view(torch.uint8).fill_(255)
        wanted = torch.empty((rows, columns), dtype=dtype)
        gather_ranks(list(parts), {"out": wanted})
        launches.append((parts, wanted, [torch.zeros_like(wanted) for _ in range(ranks)]))

    def body(rank: int) -> None:
        own = random.Random(rank)
        for parts, _, outs in launches:
            time.sleep(own.choice((0, 0, 0.002, 0.006)))
            x = parts[rank]
            grid = min(-(-x.nbytes // 16 // THREADS), MAX_BLOCKS)
            given = [*NOTHING_AFTER, pointer(outs[rank])]
            buffers.call(library, rank, x, (grid, 1), given, 30 * 10**9)

    run_ranks([lambda rank=rank: body(rank) for rank in range(ranks)])
    for number, (_, wanted, outs) in enumerate(launches):
        for rank, out in enumerate(outs):
            assert same(out, wanted), (number, rank)
    buffers.require_left_empty(LAUNCHES)
