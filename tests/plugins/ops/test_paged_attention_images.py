"""images.cu, thread by thread on a CPU: every key where products want it, and nothing beside."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.attention import FP8, World
from support.emulated_images import compile_images, compile_search

# Requests are read 32 at a time, and most have one token.
LENGTHS = (700, 64, 1, 333, 129, *[30] * 40, 200)
NEW, MIN_TOKENS = (700, 2, 1, 40, 129, *[1] * 40, 200), 2
ROOM = 12  # tiles; 700 keys are 11
OPERANDS = 2 * 64 * 128  # numbers of a tile, keys and values


def address(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def operand(rows: torch.Tensor) -> torch.Tensor:
    """Keys [up to 64, 128] as an operand: two halves of 64 dimensions, 16-byte parts swizzled."""
    padded = torch.zeros(64, 128, dtype=rows.dtype)
    padded[: len(rows)] = rows
    parts = padded.view(64, 2, 8, 8).transpose(0, 1)  # half, key, part, number
    key, part = torch.meshgrid(torch.arange(64), torch.arange(8), indexing="ij")
    return parts[:, key, part ^ (key & 7)].flatten()


@pytest.mark.parametrize("heads", [(0, 3), (2, 1)], ids=["all heads", "one head"])
@pytest.mark.parametrize("tokens_per_block", [2, 8, 32, 64, 128])
@pytest.mark.parametrize("kv_dtype", [FP8, torch.bfloat16], ids=str)
def test_images_are_operands_of_all_keys_and_zeros(kv_dtype, tokens_per_block, heads):
    world = World(3, 3, 128, LENGTHS, kv_dtype=kv_dtype, tokens_per_block=tokens_per_block)
    first, count = heads
    wide = torch.float16 if kv_dtype == FP8 else torch.bfloat16
    chunks = [request for request, new in enumerate(NEW) if new >= MIN_TOKENS]
    images = torch.full((len(chunks) + 1, ROOM, count, OPERANDS), 7.0, dtype=wide)
    cache, tables, lengths = world.cache[0], world.tables, torch.tensor(LENGTHS).int()
    starts = torch.from_numpy(np.cumsum((0, *NEW))).int()
    kernel = compile_images(
        MODEL_TYPE="BF16",
        KV_TYPE="E4M3" if kv_dtype == FP8 else "BF16",
        HEADS=3,
        GROUP=1,
        SIZE=128,
        TOKENS_PER_BLOCK=tokens_per_block,
        UNIT=1,
        MOST_UNIT=8,
    )
    kernel.launch(
        *(address(cache), ctypes.c_longlong(cache.nbytes)),
        *(address(starts), address(lengths), address(tables)),
        *(address(images), ctypes.c_longlong(images.nbytes)),
        *(tables.stride(0), len(LENGTHS), MIN_TOKENS, ROOM, first, count, 7),
    )
    assert len(chunks) < len(NEW) and (images[len(chunks) :] == 7).all(), "room of nobody"
    for place, request in enumerate(chunks):
        length = LENGTHS[request]
        tiles = -(-length // 64)
        assert (images[place, tiles:] == 7).all(), "written beside"
        blocks = tables[request, : -(-length // tokens_per_block)].long()
        rows = cache[blocks].to(wide).permute(1, 2, 0, 3, 4).reshape(2, 3, -1, 128)[:, :, :length]
        for tile in range(tiles):
            keys = slice(64 * tile, 64 * tile + 64)
            for head in range(count):
                wanted = [operand(rows[which, first + head, keys]) for which in (0, 1)]
                assert torch.equal(images[place, tile, head], torch.cat(wanted)), (request, tile)


@pytest.mark.parametrize("requests", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_warp_finds_every_chunk_in_order(requests, share):
    chance = np.random.default_rng(requests)
    new = np.where(chance.random(requests) < share, 5, chance.integers(0, 3, requests))
    starts = torch.from_numpy(np.cumsum((0, *new))).int()
    lengths = torch.from_numpy(chance.integers(0, 4, requests)).int()  # without keys: padding
    found = torch.full((32, requests + 1), -1, dtype=torch.int32)
    compile_search().search(address(starts), address(lengths), requests, 3, address(found))
    wanted = [i for i in range(requests) if new[i] >= 3 and lengths[i] > 0] + [requests]
    assert all(row[: len(wanted)] == wanted for row in found.tolist())
    assert (found[:, len(wanted) :] == -1).all()
