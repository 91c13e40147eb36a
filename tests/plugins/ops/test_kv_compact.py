"""Moving an accepted path's keys and values: the kernel and the reference against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.ops.kv_compact.kernel import compact_launch, kernels
from llmctl.plugins.ops.kv_compact.reference import compact

CASES = [  # heads, tokens a block, head size, dtype
    (2, 8, 64, torch.bfloat16),
    (1, 32, 128, torch.float8_e4m3fn),
    (3, 16, 80, torch.int8),
    (2, 24, 96, torch.float16),
]


def make(heads: int, per_block: int, size: int, dtype: torch.dtype, seed: int):
    """A cache of three layers, and the moves of paths in three requests (the second has none):
    slots behind different roots, of blocks in any order."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 24, 2, heads, per_block, size * dtype.itemsize)
    cache = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    blocks = torch.randperm(24, generator=generator).tolist()
    requests = []
    for index, drafts in enumerate((37, 0, 9)):
        table = blocks[8 * index : 8 * index + 8]
        root = draw.randrange(3, 8 * per_block - 40)
        path = sorted(draw.sample(range(drafts), drafts // 2))
        places = [(root + i, root + depth) for depth, i in enumerate(path) if i != depth]
        requests.append(
            [tuple(table[p // per_block] * per_block + p % per_block for p in x) for x in places]
        )
    return cache, requests


def one_by_one(cache: torch.Tensor, moves) -> None:
    per_block, raw = cache.shape[4], cache.view(torch.uint8)
    for source, target in moves:
        (a, i), (b, j) = divmod(source, per_block), divmod(target, per_block)
        raw[:, b, :, :, j] = raw[:, a, :, :, i].clone()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_all_at_once_is_one_by_one(case, seed):
    cache, requests = make(*case, seed)
    wanted, found, interpreted = cache.clone(), cache.clone(), cache.clone()
    for moves in requests:
        one_by_one(wanted, moves)
    compact(found, [move for moves in requests for move in moves])
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert not torch.equal(found.view(torch.uint8), cache.view(torch.uint8))
    starts = torch.tensor([0, *(len(moves) for moves in requests)]).cumsum(0).int()
    flat = torch.tensor([move for moves in requests for move in moves], dtype=torch.int32)
    run_launches([compact_launch(interpreted, starts, flat)])
    assert torch.equal(interpreted.view(torch.uint8), wanted.view(torch.uint8))


def test_the_kernel_compiles_without_spills():
    for heads, page, token_bytes in ((8, 32, 128), (8, 64, 64), (4, 16, 160), (8, 32, 256)):
        (spec,) = kernels(heads, page, token_bytes)
        assert compile_kernel(spec).local_bytes == 0
