"""FP8 products of prompts' attention: the same bits however prompts are cut and whatever is beside
them, 16-bit products for the rest, and the numbers of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention import FP8, Part, World, same_bits
from support.fp8_attention import Fp8World
from support.gpu import execute

from llmctl.plugins.ops.paged_attention.chunk_fp8 import chunk_fp8
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import CHAIN, attend

LENGTHS = (5000, 1500, 600, 300, 40)
ENDS = {0: 4864, 1: 1280, 2: 512, 3: 256}
WORLDS: list[dict[str, Any]] = [
    {"heads": 64, "kv_heads": 8, "spread": 3.0, "quantize_out": True},
    {"heads": 32, "kv_heads": 8, "tokens_per_block": 64},
    {"heads": 9, "kv_heads": 3, "tokens_per_block": 8, "spread": 2.0},
    {"heads": 7, "kv_heads": 1, "tokens_per_block": 256, "dtype": torch.float16},
]
STEPS: list[list[Part]] = [
    [(r, 0, n) for r, n in enumerate(LENGTHS)],
    [(0, 0, 256)],
    [(0, 256, 1792), (1, 0, 512)],
    [(0, 2048, 2952), (4, 39, 1)],
    [(0, 4608, 392), (1, 1024, 256), (2, 256, 344)],
    [(1, 1299, 1), (1, 1280, 20), (0, 4352, 512), (3, 0, 300), (2, 599, 1)],
    [(4, p, 1) for p in range(40)] + [(1, 512, 768), (2, 0, 256)] + [(1, 1400, 11)],
]


def made(world: dict[str, Any]) -> Fp8World:
    return Fp8World(
        **world,
        size=128,
        kv_dtype=FP8,
        lengths=LENGTHS,
        context_ends=ENDS,
        max_batch_size=64,
        device="cuda",
    )


def alone(world: World) -> list[torch.Tensor]:
    """Every request in one step of its own."""
    return [world.run([(r, 0, n)], execute)[0] for r, n in enumerate(LENGTHS)]


# Room for operands: of all, of some heads at a time, of one head of a request.
@pytest.mark.parametrize("room", [128 << 20, 5 << 20, 1])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_bits_follow_from_a_request_alone(world, room, monkeypatch):
    own = made(world)
    wanted = alone(own)
    monkeypatch.setattr(chunk_fp8, "_IMAGE_BYTES", room)
    own.scratch = {}
    for parts in STEPS:
        for padding in ((0, 0), (3, 2)):
            found = own.run(parts, execute, padding)
            for (request, start, count), rows in zip(parts, found, strict=True):
                right = wanted[request][start : start + count]
                assert same_bits(rows, right), (request, start, count)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_rows_behind_the_end_have_16_bit_products(world):
    own = made(world)
    plain = World(
        **world, size=128, kv_dtype=FP8, lengths=LENGTHS, max_batch_size=64, device="cuda"
    )
    for request, (found, other) in enumerate(zip(alone(own), alone(plain), strict=True)):
        end = ENDS.get(request, 0)
        assert same_bits(found[end:], other[end:])
        if end:
            before, exact = found[:end].float(), other[:end].float()
            error = (before - exact).norm() / exact.norm()
            assert 0.005 < error < 0.12, error


@pytest.mark.parametrize("request_id", [0, 2])
def test_they_give_the_numbers_of_the_reference(request_id):
    own = made({"heads": 4, "kv_heads": 2, "spread": 2.0})
    end = ENDS[request_id]
    found = own.run([(request_id, 0, LENGTHS[request_id])], execute)[0][:end]
    blocks = own.tables[request_id].long().cuda()
    k, v = (own.cache[0][blocks, i].transpose(0, 1).flatten(1, 2) for i in range(2))
    for rows in (slice(0, 200), slice(end - 100, end)):
        positions = torch.arange(rows.start, rows.stop, device="cuda")
        for head in range(4):
            columns = slice(128 * head, 128 * head + 128)
            q = own.queries[request_id][rows, columns]
            keys, values = k[head // 2, : rows.stop], v[head // 2, : rows.stop]
            scale = 128**-0.5 * own.scales["k_scale"].item()
            wanted = (
                attend(q, keys, values, positions, scale, (CHAIN, CHAIN)) * own.scales["v_scale"]
            )
            same = (found[rows, columns] == wanted.bfloat16()).float().mean().item()
            assert same > 0.99, (head, rows, same)


def test_many_items_are_each_taken_once():
    """More blocks of tokens than thread blocks, many times in a row."""
    own = made(WORLDS[0])
    wanted = alone(own)
    for _ in range(20):
        found = own.run([(r, 0, n) for r, n in enumerate(LENGTHS)], execute)
        for one, right in zip(found, wanted, strict=True):
            assert same_bits(one, right)
