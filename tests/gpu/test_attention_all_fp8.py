"""FP8 products of every token: few_fp8.cu gives the bits of chunk_fp8.cu, whatever the step, the
context and whoever is beside a request, and both the numbers of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention import FP8, Part, mismatches, same_bits
from support.fp8_attention import AllFp8World
from support.gpu import execute

from llmctl.plugins.ops.paged_attention.chunk_fp8 import chunk_fp8
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import KEYS, attend

LENGTHS = (5000, 1500, 600, 300, 40)
WORLDS: list[dict[str, Any]] = [
    {"heads": 64, "kv_heads": 8, "spread": 3.0, "quantize_out": True},
    {"heads": 32, "kv_heads": 8, "tokens_per_block": 64},
    {"heads": 9, "kv_heads": 3, "tokens_per_block": 8, "spread": 2.0},
    {"heads": 7, "kv_heads": 1, "tokens_per_block": 256, "dtype": torch.float16},
    {"heads": 2, "kv_heads": 2, "quantize_out": True},
]
EDGES = (0, 1, KEYS - 2, KEYS - 1, KEYS, KEYS + 1, 511, 512, 1023, 1024, 2047, 2048, 3071, 4095)
SHORT_STEPS: list[list[Part]] = [
    *([(0, at, 1)] for at in (*EDGES, 4999)),
    *([(0, at, count)] for count in (2, 5, 11, 16, 17) for at in (0, 120, 127, 505, 1020, 4980)),
    [(0, 4989, 11), (1, 1489, 11)],
    [(0, 4999, 1), (1, 700, 2), (2, 599, 1), (3, 283, 17), (4, 0, 5)],
    [(4, at, 1) for at in range(40)] + [(1, 1400 + at, 1) for at in range(20)],
    [(0, 4000 + 17 * n, 17) for n in range(50)],
]
MIXED_STEPS: list[list[Part]] = [
    [(r, 0, n) for r, n in enumerate(LENGTHS)],
    [(0, 100, 18)],
    [(0, 4982, 18), (1, 1482, 18), (2, 0, 17)],
    [(0, 77, 1000), (4, 39, 1), (1, 1300, 11)],
    [(1, 1299, 1), (1, 1280, 20), (0, 4352, 512), (3, 0, 300), (2, 599, 1)],
    [(4, at, 1) for at in range(40)] + [(1, 512, 768), (2, 0, 255)] + [(1, 1400, 11)],
]


def made(world: dict[str, Any], **more: Any) -> AllFp8World:
    own = {"lengths": LENGTHS, "max_batch_size": 64, "device": "cuda", **world, **more}
    return AllFp8World(**own, size=128, kv_dtype=FP8)


def alone(world: AllFp8World) -> list[torch.Tensor]:
    """Every request in one step of its own, by chunk_fp8.cu."""
    return [world.run([(r, 0, n)], execute)[0] for r, n in enumerate(LENGTHS)]


def check(world: AllFp8World, wanted: list[torch.Tensor], steps: list[list[Part]]) -> None:
    longest = max(LENGTHS)
    for parts in steps:
        for padding, bounds in (((0, 0), {}), ((3, 2), {}), ((0, 0), {"max_kv_len": longest})):
            found = world.run(parts, execute, padding, **bounds)
            for (request, start, count), rows in zip(parts, found, strict=True):
                right = wanted[request][start : start + count]
                assert same_bits(rows, right), (request, start, count, padding, bounds)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_few_tokens_have_the_bits_that_they_have_in_a_prompt(world):
    own = made(world)
    own.fill_unused(0x7F)  # no number
    check(own, alone(own), SHORT_STEPS)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_variations_of_every_kernels_test(world):
    assert mismatches(made(world, lengths=LENGTHS[:2]), execute) == []


# Room for operands: of all, of some heads at a time, of one head of a request.
@pytest.mark.parametrize("room", [128 << 20, 5 << 20, 1])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_chunks_of_any_length_have_them_beside_others(world, room, monkeypatch):
    own = made(world)
    wanted = alone(own)
    monkeypatch.setattr(chunk_fp8, "_IMAGE_BYTES", room)
    own.scratch = {}
    check(own, wanted, MIXED_STEPS)


@pytest.mark.parametrize("world", WORLDS[:2], ids=str)
def test_of_the_last_layer_the_last_tokens_have_them(world):
    own = made(world)
    last = replace(own, is_last=True, scratch={})
    last.cache, last.queries, last.tables = own.cache, own.queries, own.tables
    for parts in MIXED_STEPS:
        pairs = zip(last.run(parts, execute), own.run(parts, execute), strict=True)
        assert all(same_bits(found[-17:], right[-17:]) for found, right in pairs)


def test_the_longest_contexts_are_those_of_prompts():
    own = made({"heads": 64, "kv_heads": 8, "lengths": (131072,)}, max_seq_len=131072)
    steps: list[list[Part]] = [[(0, 131072 - 64, 64)]]
    (wanted,) = own.run(steps[0], execute)
    for count in (1, 8, 11, 17):
        (found,) = own.run([(0, 131072 - count, count)], execute)
        assert same_bits(found, wanted[-count:]), count


def test_bases_that_are_raised_with_a_chain_and_within_one():
    own = made({"heads": 64, "kv_heads": 8, "lengths": (10240,)})
    own.let_logits_rise()
    ((_, start, count),) = steps = [(0, 10240 - 1100, 1100)]
    (wanted,) = own.run(steps, execute)
    for few in (1, 8, 11, 17):
        for at in (start, start + 512, start + count - few):
            (found,) = own.run([(0, at, few)], execute)
            assert same_bits(found, wanted[at - start : at - start + few]), (few, at)


def test_both_give_the_numbers_of_the_reference():
    own = made({"heads": 4, "kv_heads": 2, "spread": 2.0})
    blocks = own.tables[2].long().cuda()
    k, v = (own.cache[0][blocks, i].transpose(0, 1).flatten(1, 2)[:, :600] for i in range(2))
    for count in (600, 11, 1):
        found = own.run([(2, 600 - count, count)], execute)[0]
        positions = torch.arange(600 - count, 600, device="cuda")
        for head in range(4):
            columns = slice(128 * head, 128 * head + 128)
            q = own.queries[2][600 - count :, columns]
            scale = 128**-0.5 * own.scales["k_scale"].item()
            right = attend(q, k[head // 2], v[head // 2], positions, scale) * own.scales["v_scale"]
            same = (found[:, columns] == right.bfloat16()).float().mean().item()
            assert same > 0.99, (head, count, same)
