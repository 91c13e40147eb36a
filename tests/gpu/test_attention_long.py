"""Contexts of 40,000 tokens: every kernel gives the bits of the context kernel, however many warps
or thread blocks share a context, alone and in a batch, with chunks of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from support.attention import FP8, INT8, Part, World, run_one, same_bits
from support.gpu import execute
from support.long import BLOCK_ROWS, attend_long

from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.long import long
from llmctl.plugins.ops.paged_attention.long_batch import long_batch
from llmctl.plugins.ops.paged_attention.shared.tiles import KEYS, MOST_UNIT

LENGTHS = (40_000, 20_000, 9_000)
EDGES = (LENGTHS[0], batch.LONG + 100, 16 * MOST_UNIT * KEYS + 1, 32_768, 33_000)
WORLDS: list[dict[str, Any]] = [
    {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "quantize_out": True},
    {"heads": 32, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "spread": 3.0},
    {"heads": 32, "kv_heads": 8, "size": 64, "kv_dtype": FP8},
    {"heads": 28, "kv_heads": 4, "size": 128, "kv_dtype": FP8, "tokens_per_block": 8},
    {"heads": 32, "kv_heads": 8, "size": 128},
    {"heads": 28, "kv_heads": 4, "size": 128, "dtype": torch.float16, "kv_dtype": torch.float16},
    {"heads": 16, "kv_heads": 1, "size": 128, "kv_dtype": INT8},
]
SHARED = [w for w in WORLDS if (w["size"], w.get("kv_dtype")) == (128, FP8)]  # by long.cu


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def world(request: pytest.FixtureRequest) -> World:
    """One world for all tests of it: making 40,000 queries takes longer than attending."""
    return World(**request.param, lengths=LENGTHS, device="cuda")


def context(world: World, request: int, start: int, count: int) -> torch.Tensor:
    """The rows as the context kernel computes them, in a chunk of 100 tokens."""
    chunk: list[Part] = [(request, start + count - 100, 100)]
    step = world.step(chunk)
    launches = kernel.launches(world.call(chunk), world.env(step), world.shape(step))
    assert [each.spec.name.split(".")[1] for each in launches] in (["chunk"], ["context"])
    return world.run(chunk, execute)[0][-count:]


def compare(world: World, parts: list[Part]) -> None:
    for (request, start, count), rows in zip(parts, world.run(parts, execute), strict=True):
        assert same_bits(rows, context(world, request, start, count)), (request, start, count)


def _warps_of(parts: int | None) -> Callable[..., int]:
    """How many share the contexts of a KV head: as many as a step chooses, or so many each of
    three."""
    return batch._num_warps if parts is None else lambda *_: 3 * parts


@pytest.mark.parametrize("parts", [None, 1, 2, 3, 7, 30])
def test_warps_that_share_a_context_give_the_bits_of_the_context_kernel(
    world: World, parts: int | None
) -> None:
    group = world.heads // world.kv_heads
    for tokens in {1, 8 // group, 16 // group} - {0}:
        for end in EDGES:
            rows: list[Part] = [(0, end - tokens, tokens)]
            step, call = world.step(rows), world.call(rows, 3)
            env = world.env(step, 2)
            shape = replace(world.shape(step), num_requests=3)
            with mock.patch.object(batch, "_num_warps", _warps_of(parts)):
                (launch,) = kernel.launches(call, env, shape)
            assert launch.spec.constants["TOGETHER"]
            (found,) = run_one(launch, call, env, rows, execute)
            assert same_bits(found, context(world, 0, end - tokens, tokens)), (end, tokens)


def test_requests_of_different_lengths_beside_each_other(world: World) -> None:
    """The shortest has fewer parts than the launch, or one; padding requests have none."""
    one: list[Part] = [(0, LENGTHS[0] - 1, 1), (1, LENGTHS[1] - 1, 1), (2, LENGTHS[2] - 1, 1)]
    compare(world, one)
    compare(world, [*one, (0, 0 + 99, 1), (1, 8191, 1), (2, 511, 1)])
    compare(world, one * 8)
    for padding in (1, 3):
        rows = world.run(one, execute, (padding, padding))
        for (request, start, count), found in zip(one, rows, strict=True):
            assert same_bits(found, context(world, request, start, count))


@pytest.mark.parametrize("world", SHARED, indirect=True, ids=str)
def test_thread_blocks_that_share_a_context_or_have_it_alone(world: World) -> None:
    """Of long.cu and long_batch.cu: each binary, with one block of rows or two."""
    assert long.covers_long(world.call([(0, 0, 1)]), world.limits())
    columns = [each.rows for each in long_batch.VARIANTS]
    for end in (LENGTHS[0], 16 * MOST_UNIT * KEYS + 1):
        for tokens in (3, 11, 16, 17):
            parts: list[Part] = [(0, end - tokens, tokens)]
            wanted = context(world, 0, end - tokens, tokens)
            for rows in (*BLOCK_ROWS, *(columns if tokens == 11 else ())):
                for splits in (0, 1, 2, 7):
                    (found,) = attend_long(
                        world, parts, execute, splits, rows=rows, bound=LENGTHS[0]
                    )
                    assert same_bits(found, wanted), (end, tokens, rows, splits)
    many: list[Part] = [(i % 3, LENGTHS[i % 3] - 11, 11) for i in range(30)]
    compare(world, many)


@pytest.mark.parametrize("world", SHARED, indirect=True, ids=str)
def test_equal_ranges_of_all_tiles(world: World) -> None:
    """Of contexts that nobody shares, of three lengths and a short one, with padding."""
    parts: list[Part] = [(i % 3, LENGTHS[i % 3] - 11 - 100 * i, 11) for i in range(9)]
    parts.append((1, 190, 11))
    wanted = [context(world, *part) for part in parts]
    for ranges in (1, 5, 37, 100, 264):
        found = attend_long(world, parts, execute, 1, rows=64, bound=LENGTHS[0], ranges=ranges)
        for part, rows, own in zip(parts, found, wanted, strict=True):
            assert same_bits(rows, own), (ranges, part)


@pytest.mark.parametrize("world", SHARED, indirect=True, ids=str)
def test_contexts_of_different_lengths_shared_by_all(world: World) -> None:
    """One is much longer; as a step launches them, or with little room for work items."""
    half, short = LENGTHS[1:]
    lengths = (LENGTHS[0], 190, short // 9, 111, half, short // 3, short)
    for requests in (2, 3, 7, 24, 40):
        parts: list[Part] = [(0, lengths[i % 7] - 11 - i // 7, 11) for i in range(requests)]
        wanted = [context(world, *part) for part in parts]
        for rows, room in ((64, None), (64, 100), (128, None), (128, 100)):
            splits = 2 if room and requests <= 7 else 0
            found = attend_long(
                *(world, parts, execute, splits), rows=rows, bound=LENGTHS[0], room=room
            )
            for part, own, other in zip(parts, found, wanted, strict=True):
                assert same_bits(own, other), (requests, rows, room, part)


@pytest.mark.parametrize("world", SHARED[:2], indirect=True, ids=str)
def test_idle_multiprocessors_help_with_the_beginning(world: World) -> None:
    """One request without padding, as a verification of one chain is launched."""
    for end in (*EDGES, LENGTHS[1], LENGTHS[2]):
        part: Part = (0, end - 11, 11)
        (found,) = attend_long(world, [part], execute, rows=128, bound=LENGTHS[0], helped=True)
        assert same_bits(found, context(world, *part)), end


def test_verifications_and_chunks_of_a_long_context(world: World) -> None:
    for end in (LENGTHS[0], 16 * MOST_UNIT * KEYS + 5):
        for tokens in (5, 11, 17, 700, 2048):
            parts: list[Part] = [(0, end - tokens, tokens)]
            rows = world.run(parts, execute)[0]
            for count in {1, min(tokens, 11)}:
                assert same_bits(rows[-count:], context(world, 0, end - count, count)), (
                    end,
                    tokens,
                )
    compare(world, [(0, LENGTHS[0] - 11, 11), (1, LENGTHS[1] - 5, 5), (2, LENGTHS[2] - 1, 1)])
