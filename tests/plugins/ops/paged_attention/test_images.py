"""images.cu, thread by thread on a CPU: every key where products want it, and nothing beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import emulated_warps
from support.attention import FP8, World

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention.chunk.chunk import images_spec

# Requests are read 32 at a time, and most have one token.
LENGTHS = (700, 64, 1, 333, 129, *[30] * 40, 200)
NEW, MIN_TOKENS = (700, 2, 1, 40, 129, *[1] * 40, 200), 2
ROOM = 12  # tiles; 700 keys are 11
OPERANDS = 2 * 64 * 128  # numbers of a tile, keys and values
NO_BLOCK = 1 << 30  # far outside of the cache


def operand(rows: torch.Tensor) -> torch.Tensor:
    """Keys [up to 64, 128] as an operand: two halves of 64 dimensions, 16-byte parts swizzled."""
    padded = torch.zeros(64, 128, dtype=rows.dtype)
    padded[: len(rows)] = rows
    parts = padded.view(64, 2, 8, 8).transpose(0, 1)  # half, key, part, number
    key, part = torch.meshgrid(torch.arange(64), torch.arange(8), indexing="ij")
    return parts[:, key, part ^ (key & 7)].flatten()


def convert(
    world: World, new: tuple[int, ...], heads: tuple[int, int], images: torch.Tensor
) -> None:
    """By seven thread blocks. new: tokens of each request; the world may have more requests."""
    call = world.call([(len(world.lengths) - 1, 0, 1)])
    starts = torch.from_numpy(np.cumsum((0, *new))).int()
    lengths = torch.tensor(world.lengths).int()
    spec = images_spec(call, world.limits())
    arguments = (world.cache[0], starts, lengths, world.tables, images, world.tables.stride(0))
    numbers = (len(new), MIN_TOKENS, images.shape[1], *heads)
    emulated_warps.run([Launch(spec, (7, 1, 1), (*arguments, *numbers))])


@pytest.mark.parametrize("heads", [(0, 3), (2, 1)], ids=["all heads", "one head"])
@pytest.mark.parametrize("tokens_per_block", [2, 8, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", [FP8, torch.bfloat16], ids=str)
def test_images_are_operands_of_all_keys_and_zeros(kv_dtype, tokens_per_block, heads):
    world = World(3, 3, 128, LENGTHS, kv_dtype=kv_dtype, tokens_per_block=tokens_per_block)
    first, count = heads
    wide = torch.float16 if kv_dtype == FP8 else torch.bfloat16
    chunks = [request for request, new in enumerate(NEW) if new >= MIN_TOKENS]
    images = torch.full((len(chunks) + 1, ROOM, count, OPERANDS), 7.0, dtype=wide)
    for request, length in enumerate(LENGTHS):
        world.tables[request, -(-length // tokens_per_block) :] = NO_BLOCK
    convert(world, NEW, heads, images)
    assert len(chunks) < len(NEW) and (images[len(chunks) :] == 7).all(), "room of nobody"
    for place, request in enumerate(chunks):
        length = LENGTHS[request]
        tiles = -(-length // 64)
        assert (images[place, tiles:] == 7).all(), "written beside"
        blocks = world.tables[request, : -(-length // tokens_per_block)].long()
        rows = world.cache[0][blocks].to(wide).permute(1, 2, 0, 3, 4)
        rows = rows.reshape(2, 3, -1, 128)[:, :, :length]
        for tile in range(tiles):
            keys = slice(64 * tile, 64 * tile + 64)
            for head in range(count):
                wanted = [operand(rows[which, first + head, keys]) for which in (0, 1)]
                assert torch.equal(images[place, tile, head], torch.cat(wanted)), (request, tile)


@pytest.mark.parametrize("requests", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_warp_finds_every_chunk_in_order(requests, share):
    """Each has an image of its own, one after another, of its own first key; padding has none."""
    chance = np.random.default_rng(requests)
    new = np.where(chance.random(requests) < share, 5, chance.integers(0, 2, requests))
    lengths = tuple(chance.integers(0, 4, requests).tolist())  # without keys: padding
    world = World(3, 3, 128, (*lengths, 3), kv_dtype=FP8, tokens_per_block=8)
    images = torch.full((requests + 1, 1, 1, OPERANDS), 7.0, dtype=torch.float16)
    convert(world, tuple(new.tolist()), (0, 1), images)
    wanted = [i for i in range(requests) if new[i] >= MIN_TOKENS and lengths[i] > 0]
    blocks = world.tables[wanted, 0].long()
    keys = world.cache[0][blocks][:, 0, 0, 0].half()
    assert torch.equal(images[: len(wanted), 0, 0, :64], keys[:, :64])
    assert (images[len(wanted) :] == 7).all()
