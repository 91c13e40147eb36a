"""long.cu and long_batch.cu with their threads on a CPU: every way to divide rows and contexts
gives the same bits, which are near those of the reference; the bits of tensor cores are compared on
a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support import emulated_warps
from support.attention import FP8, Part, World, same_bits
from support.long import BLOCK_ROWS, BOUND, attend_long
from support.trees import along, random_parents

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.runtime.step import find_paths

NAN = 0x7F


def world_of(group: int, lengths: tuple[int, ...], **sizes: object) -> World:
    """Two KV heads; what is in no request's cache is no number."""
    sizes = {"kv_heads": 2, "tokens_per_block": 32, "spread": 3.0, **sizes}
    heads = group * int(str(sizes["kv_heads"]))
    world = World(heads, size=128, lengths=lengths, kv_dtype=FP8, max_seq_len=BOUND, **sizes)
    world.fill_unused(NAN)
    return world


def attend(
    world: World,
    parts: list[Part],
    splits: int,
    *,
    rows: int = BLOCK_ROWS[-1],
    has_trees: bool = False,
    **more: int | None,
) -> list[torch.Tensor]:
    """The rows of the parts, with copies done early or late."""

    def execute(launches: Sequence[Launch]) -> None:
        many = launches[0].grid[0]
        emulated_warps.run(launches, many, is_late=many % 2 == 0, together=many)

    return attend_long(world, parts, execute, splits, rows=rows, has_trees=has_trees, **more)


@pytest.mark.parametrize(
    ("group", "tokens", "lengths", "sizes", "rows"),
    [
        (8, 11, (300, 11), {}, 88),  # a row for each column of a binary
        (8, 11, (1090,), {"tokens_per_block": 8, "kv_heads": 1}, 88),  # many pages
        (8, 9, (450, 70), {"tokens_per_block": 128}, 48),  # two blocks of rows
        (8, 11, (300,), {}, 64),
        (7, 16, (1090,), {"tokens_per_block": 8, "kv_heads": 1}, 128),  # many pages
        (8, 17, (200,), {"tokens_per_block": 128, "dtype": torch.float16}, 128),
    ],
    ids=str,
)
def test_contexts_divided_in_any_way(group, tokens, lengths, sizes, rows):
    world = world_of(group, lengths, **sizes)
    parts = [(request, length - tokens, tokens) for request, length in enumerate(lengths)]
    whole = torch.cat(attend(world, parts, 1, rows=rows))
    step, call = world.step(parts), world.call(parts)
    cache = world.cache.clone()
    cache.view(torch.uint8)[cache.view(torch.uint8) == NAN] = 0
    reference(call.inputs, call.outputs, call.attributes, step, cache)
    wanted = call.outputs["out"].float()
    assert (whole.float() - wanted).norm() < 2e-3 * wanted.norm()
    for splits in (2, 3, 7):
        found = torch.cat(attend(world, parts, splits, rows=rows))
        assert same_bits(found, whole), splits
    for request, length in enumerate(lengths):  # alone, with fewer tokens
        (few,) = attend(world, [(request, length - 1, 1)], 2, rows=rows)
        assert same_bits(few, whole[(request + 1) * tokens - 1 : (request + 1) * tokens])


def test_idle_thread_blocks_help_with_the_beginnings_of_contexts():
    """Of two KV heads each, one after the other: the end of the first share, and the beginning of
    the second."""
    for length, kv_heads, splits in ((4090, 2, 4), (3072, 2, 3), (2048, 4, 4), (300, 2, 2)):
        world = world_of(8, (length,), kv_heads=kv_heads, tokens_per_block=64)
        parts = [(0, length - 11, 11)]
        (wanted,) = attend(world, parts, 1)
        (found,) = attend(world, parts, splits, helped=True)
        assert same_bits(found, wanted), (length, splits)
        assert not any(x.any() for name, x in world.scratch.items() if "counters" in name)


@pytest.mark.parametrize(
    ("group", "tokens", "lengths", "sizes"),
    [
        (4, 11, (5000, 70, 11), {}),  # some have several thread blocks, others one
        (8, 17, (1500, 333, 1000), {"tokens_per_block": 128}),  # several blocks of rows
        (1, 3, (900, *(3 + n for n in range(36))), {"kv_heads": 1}),  # more than a warp has lanes
    ],
    ids=str,
)
def test_contexts_of_different_lengths_shared_by_all(group, tokens, lengths, sizes):
    """And where there is no room, or little, for stored work items."""
    world = world_of(group, lengths, max_batch_size=64, **sizes)
    parts = [(request, length - tokens, tokens) for request, length in enumerate(lengths)]
    wanted = torch.cat(attend(world, parts, 1, rows=64))
    for splits in (2, 3, 4):
        for room in (None, 0, 20):
            found = torch.cat(attend(world, parts, splits, rows=64, room=room))
            assert same_bits(found, wanted), (splits, room)
            assert not any(x.any() for name, x in world.scratch.items() if "counters" in name)


@pytest.mark.parametrize(
    ("group", "tokens", "lengths", "sizes"),
    [
        (4, 11, (1300, 70, 2100, 700, 11, 900), {}),
        (2, 11, (100, 130, 64, 200), {"tokens_per_block": 8}),
        (8, 17, (1500, 333, 1000), {"tokens_per_block": 128}),  # several blocks of rows
        (4, 11, (70, 4000, 500, 11, 2600), {}),  # longer ones have thread blocks of their own
        (1, 3, (900, *(3 + n for n in range(36)), 2000), {"kv_heads": 1}),  # more than 32 requests
    ],
    ids=str,
)
def test_equal_ranges_of_all_tiles(group, tokens, lengths, sizes):
    """Of contexts that nobody shares: a range has some of one, or the ends of two and those between
    them, or there is less than a range for each thread block. And where there is too little room
    for work items of those that are shared."""
    world = world_of(group, lengths, max_batch_size=64, **sizes)
    parts = [(request, length - tokens, tokens) for request, length in enumerate(lengths)]
    wanted = torch.cat(attend(world, parts, 2, rows=64))
    for ranges, room in (*((n, None) for n in (1, 2, 3, 5, 8, 13)), (13, 40)):
        found = torch.cat(attend(world, parts, 1, rows=64, ranges=ranges, room=room))
        assert same_bits(found, wanted), (ranges, room)
        assert not any(x.any() for name, x in world.scratch.items() if "counters" in name)


@pytest.mark.parametrize(("group", "rows_of_block"), [(4, 64), (8, 128), (8, 88), (8, 48)])
def test_rows_have_the_bits_of_decoding_by_another_kernel(group, rows_of_block):
    """verification.cu adds the same numbers in the same order, sums of weights included."""
    world = world_of(group, (700,))
    rows = attend(world, [(0, 689, 11)], 1, rows=rows_of_block)[0]
    for token in (0, 10):
        one: list[Part] = [(0, 689 + token, 1)]
        step, call = world.step(one), world.call(one)
        env = replace(world.env(step), use_pdl=True)
        (launch,) = kernel.launches(call, env, world.shape(step))
        assert launch.spec.entry == "verification"
        emulated_warps.run([launch])
        assert same_bits(call.outputs["out"], rows[token : token + 1])


@pytest.mark.parametrize(
    ("group", "drafts", "root", "rows"),
    [(8, 15, 20, 128), (4, 31, 1023, 64), (2, 70, 1100, 128)],
)
def test_trees_get_the_bits_of_decoding_their_paths(group, drafts, root, rows):
    """The root in the first tile, in the last place of one, and in the middle of a work item, with
    paths over three tiles."""
    parents = random_parents(drafts, 3)
    world = world_of(group, (root + drafts + 1, 200), kv_heads=1, trees={0: parents})
    parts = [(0, root, drafts + 1), (1, 195, 5)]
    found = [attend(world, parts, splits, rows=rows, has_trees=True) for splits in (1, 2, 5)]
    for tree, chain in found[1:]:
        assert same_bits(tree, found[0][0]) and same_bits(chain, found[0][1])
    assert same_bits(found[0][1], attend(world, parts[1:], 1)[0])
    paths, depths = find_paths(parents)
    for token in (0, 1, drafts // 2, drafts):
        depth = int(depths[token])
        plain = along(world, root, tuple(paths[token, : depth + 1].tolist()))
        (wanted,) = attend(plain, [(0, root + depth, 1)], 1)
        assert same_bits(found[0][0][token : token + 1], wanted), token
