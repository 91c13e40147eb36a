"""Moving accepted paths in a cache on the GPU, compared with the reference."""

from __future__ import annotations

import random

import pytest
import torch
from support.gpu import execute

from llmctl.plugins.ops.kv_compact.kernel import compact_launch
from llmctl.plugins.ops.kv_compact.reference import compact

CASES = [
    (8, 32, 128, torch.float8_e4m3fn),
    (8, 64, 64, torch.bfloat16),
    (3, 16, 80, torch.int8),
    (2, 24, 96, torch.float16),
]


@pytest.mark.parametrize(("heads", "per_block", "size", "dtype"), CASES, ids=str)
def test_the_kernel_moves_what_the_reference_does(heads, per_block, size, dtype):
    shape = (16, 64, 2, heads, per_block, size * dtype.itemsize)
    draw = random.Random(1)
    for drafts in (3, 10, 63):
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        tables = torch.randperm(64).view(8, 8).tolist()
        requests = []
        for table in tables:
            root = draw.randrange(0, 8 * per_block - drafts)
            path = sorted(draw.sample(range(drafts), draw.randrange(drafts)))
            places = [(root + i, root + depth) for depth, i in enumerate(path) if i != depth]
            slots = [[table[p // per_block] * per_block + p % per_block for p in x] for x in places]
            requests.append([tuple(pair) for pair in slots])
        flat = [move for moves in requests for move in moves]
        wanted, found = raw.clone().view(dtype), raw.clone().view(dtype)
        compact(wanted, flat)
        starts = torch.tensor([0, *map(len, requests)]).cumsum(0).int().cuda()
        moves = torch.tensor(flat, dtype=torch.int32).view(-1, 2).cuda()
        execute([compact_launch(found, starts, moves)])
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
