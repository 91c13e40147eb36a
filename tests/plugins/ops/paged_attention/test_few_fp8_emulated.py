"""few_fp8.cu with its threads on a CPU, whose products are those of tensor cores: the numbers of
the reference, however many thread blocks divide a step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support import cuda_samples, emulated_warps
from support.attention import FP8, Part
from support.fp8_attention import AllFp8World

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import launch_arguments
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import MOST_UNIT, UNIT
from llmctl.plugins.ops.paged_attention.few_fp8 import few_fp8
from llmctl.plugins.ops.paged_attention.few_fp8.cut import ROWS, cuts
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT
from llmctl.plugins.ops.paged_attention.shared.tiles import unit_start

LENGTHS = (2600, 1500, 600, 300, 40)
NAN = 0x7F
STEP: list[Part] = [(0, 2589, 11), (1, 1489, 11), (4, 38, 2), (2, 589, 11), (3, 289, 11)]


def world_of(lengths: tuple[int, ...] = LENGTHS, **sizes: object) -> AllFp8World:
    """What is in no request's cache is no number."""
    made = {"heads": 4, "kv_heads": 2, "spread": 2.0, "quantize_out": False, **sizes}
    world = AllFp8World(**made, size=128, kv_dtype=FP8, lengths=lengths, max_batch_size=8)
    world.fill_unused(NAN)
    return world


def attend(
    world: AllFp8World,
    parts: Sequence[Part],
    seed: int,
    blocks: int,
    padding: int = 2,
    cut: int = -1,
    **constants: int,
) -> list[torch.Tensor]:
    """Rows of the parts by so many thread blocks, copies done early or late. padding: requests
    that have nothing. cut: which one, by its rows. constants: others than the kernel has."""
    step, call = world.step(parts), world.call(parts, 3)
    env = world.env(step, max(padding, 2))
    shape = world.shape(step, num_tokens=step.num_tokens + 3, num_requests=len(parts) + padding)
    partials = launch_arguments.partials(call, env)
    own = launch_arguments.own_tensors(call, env), partials, launch_arguments.logit_scale(call)
    with patch.object(few_fp8, "choose_cut", lambda call, tokens, *_: cuts(call, tokens)[cut]):
        launch = few_fp8.few_fp8_launch(call, env, shape, *own, SHORT)
    spec = replace(launch.spec, constants={**launch.spec.constants, **constants})
    late = seed % 2 == 0
    emulated_warps.run(
        [replace(launch, spec=spec, grid=(blocks, 1, 1))], seed, is_late=late, together=blocks
    )
    assert not partials[1].any(), "a counter is not back at zero"
    rows, padding = call.outputs["out"].split((step.num_tokens, 3))
    assert (padding.view(torch.uint8) == 0x55).all(), "padding was written"
    return list(rows.split([count for *_, count in parts]))


def wanted_of(world: AllFp8World, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Those of the reference."""
    step, call = world.step(parts), world.call(parts)
    cache = world.cache.clone()
    cache.view(torch.uint8)[cache.view(torch.uint8) == NAN] = 0
    reference(call.inputs, call.outputs, call.attributes, step, cache)
    return list(call.outputs["out"].split([count for *_, count in parts]))


def agree(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """But for powers of two, which two libraries compute."""
    for own, right in zip(found, wanted, strict=True):
        assert (own.view(torch.uint8) == right.view(torch.uint8)).float().mean() > 0.999
        torch.testing.assert_close(own.float(), right.float(), rtol=0.02, atol=0.01)


@pytest.fixture(scope="module")
def several() -> tuple[AllFp8World, list[torch.Tensor]]:
    world = world_of()
    return world, wanted_of(world, STEP)


# One for all; ranges that hand contexts over; contexts of one part and of several, beside ranges.
@pytest.mark.parametrize("blocks", [1, 2, 5, 9, 14, 33])
def test_thread_blocks_divide_a_step(several, blocks):
    world, wanted = several
    agree(attend(world, STEP, blocks, blocks), wanted)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens_per_block": 8, "quantize_out": True},
        {"heads": 7, "kv_heads": 1, "tokens_per_block": 256, "dtype": torch.float16},
        {"heads": 8, "kv_heads": 1, "tokens_per_block": 64, "lengths": (1200, 300)},
        {"heads": 2, "kv_heads": 2, "spread": 40.0},
    ],
    ids=str,
)
def test_shapes_and_caches(sizes):
    """One token or several, groups of one to eight heads, bases that are raised in a chain."""
    world = world_of(**{"lengths": (600, 300), **sizes})
    for parts in ([(0, 589, 11), (1, 285, 4)], [(0, 580, 1)]):
        agree(attend(world, parts, 3, 3), wanted_of(world, parts))


def test_the_only_request():
    """Its shares are found otherwise; contexts that are shared, and those that are not."""
    world = world_of((9100,))
    step = ((9100, 1), (9100, 2), (9100, 13), (9100, 40), (1500, 9), (700, 5), (4, 3))
    for count, blocks in step:
        parts: list[Part] = [(0, count - 3, 3)]
        agree(attend(world, parts, blocks, blocks, padding=0), wanted_of(world, parts))


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_rows_do_not_depend_on_those_beside_them(several, cut):
    """Thread blocks of 8, 32 and 48 rows: 2, 8 and 11 tokens of 4 query heads a KV head."""
    world = world_of((2600, 600, 40), heads=8)
    parts: list[Part] = [(0, 2589, 11), (1, 597, 3), (2, 39, 1)]
    assert [each.tokens for each in cuts(world.call(parts), 11)] == [2, 6, 11]
    agree(attend(world, parts, cut, 7, cut=cut), wanted_of(world, parts))


def writes(world: AllFp8World, blocks: int) -> list[int]:
    """How often each thread block has kept a plan."""
    (plans,) = (x for name, x in world.scratch.items() if name.endswith(".plans"))
    size = 1 + 2 * 32 + 3 * max(world.max_batch_size, 32)
    return plans[:, : blocks * size].view(-1, blocks, size)[:, :, 0].sum(0).tolist()


def test_a_steps_plan_is_found_once():
    """As layers find it: again for other lengths, and where a number is of another write."""
    world = world_of((2600, 600))
    for nth, parts in enumerate(
        ([(0, 2589, 11), (1, 597, 3)], [(0, 2500, 11), (1, 597, 3)], [(0, 2589, 11), (1, 597, 3)])
    ):
        for _layer in range(2):
            agree(attend(world, parts, 5, 5), wanted_of(world, parts))
            assert writes(world, 5) == [nth + 1] * 5
    (plans,) = (x for name, x in world.scratch.items() if name.endswith(".plans"))
    plans[ROWS.index(32), 1 + 7] += 1 << 32
    agree(attend(world, parts, 5, 5), wanted_of(world, parts))
    assert writes(world, 5) == [4, 3, 3, 3, 3]


def test_plans_of_more_requests_than_lanes_and_than_there_is_room_for():
    world = AllFp8World(
        2, 1, 128, lengths=(70,) * 40, kv_dtype=FP8, max_batch_size=64, quantize_out=False
    )
    parts: list[Part] = [(request, 69, 1) for request in range(40)]
    another = [*parts[:36], (36, 40, 1), *parts[37:]]
    for nth, step in ((1, parts), (1, parts), (2, another), (2, another), (3, parts)):
        agree(attend(world, step, 6, 6), wanted_of(world, step))
        assert writes(world, 6) == [nth] * 6
    small = world_of((300, 40))
    for _layer in range(2):
        agree(attend(small, [(0, 289, 11)], 3, 3, padding=40), wanted_of(small, [(0, 289, 11)]))
    assert writes(small, 3) == [0, 0, 0]


def test_a_range_without_a_work_item():
    """Of contexts of 4, 2, 2 and 2 tiles, three thread blocks have 4.7 each with what a context
    costs besides: the first one's end within the first context's only work item."""
    world = world_of((500, 200, 200, 200), heads=2, kv_heads=1)
    parts: list[Part] = [(0, 497, 2), (1, 197, 2), (2, 190, 3), (3, 180, 1)]
    wanted = wanted_of(world, parts)
    for blocks in (3, 4):
        agree(attend(world, parts, blocks, blocks), wanted)


def test_queries_that_are_zero():
    """A row's power of two is that of its other numbers, or the least."""
    world = world_of((600, 300))
    for rows in world.queries:
        rows.view(-1, 128)[::5] = 0.0
        rows.view(-1, 128)[::7, 64:] = 0.0
    parts: list[Part] = [(0, 589, 11), (1, 285, 4)]
    agree(attend(world, parts, 3, 3), wanted_of(world, parts))


def test_work_items_of_several_chains():
    world = world_of((18500, 9500), heads=2, kv_heads=1)
    parts: list[Part] = [(0, 18493, 2), (1, 9489, 3)]
    wanted = wanted_of(world, parts)
    for blocks in (2, 16, 40):
        agree(attend(world, parts, blocks, blocks), wanted)


@pytest.mark.parametrize("factor_room", [1, 5, 9, 96])
def test_stored_work_items_of_which_a_thread_has_several_fours(factor_room):
    """Nine of them, and two thread blocks to a context: room for factors of all, or of a few."""
    world = world_of((4300,))
    world.let_logits_rise()
    parts: list[Part] = [(0, 4289, 11)]
    found = attend(world, parts, factor_room, 4, padding=0, FACTOR_ROOM=factor_room)
    agree(found, wanted_of(world, parts))


def test_bases_that_are_raised_with_a_chain_and_within_one():
    world = world_of((10240,), heads=2, kv_heads=1)
    world.let_logits_rise()
    parts: list[Part] = [(0, 10237, 3)]
    for blocks in (1, 9):
        agree(attend(world, parts, blocks, blocks), wanted_of(world, parts))


def test_shares_have_as_many_work_items_as_they_have_room_for():
    """A work item takes a tile and a half more than it has, in half tiles."""
    starts = [unit_start(unit, MOST_UNIT, UNIT) for unit in range(150)]
    costs = [2 * start + 3 * unit for unit, start in enumerate(starts)]

    def last_unit(tiles: int) -> int:
        unit = bisect_left(starts, tiles)
        return costs[unit] - costs[unit - 1]

    asked = [
        (tiles, most)
        for tiles in (*range(1, 70, 5), *range(70, 600, 31))
        for most in range(last_unit(tiles), 180, 7)
    ]
    asked += [(266, 57), (257, 40), (1024, 152)]  # what 16 thread blocks suffice for
    found = torch.zeros(len(asked), 200, dtype=torch.int32)
    world = world_of()
    spec = few_fp8.few_fp8_spec(world.call(STEP), world.limits(), 88)
    spec = replace(
        spec,
        name="equal_shares",
        source=str(Path(cuda_samples.__path__[0]) / "equal_shares.cu"),
        arguments=("*i32", "*i32", "i32", "i32"),
        entry="equal_shares",
    )
    arguments = (torch.tensor(asked, dtype=torch.int32), found, *found.shape)
    emulated_warps.run([Launch(spec, (1, 1, 1), arguments)])
    for (tiles, most), (count, *begins) in zip(asked, found.tolist(), strict=True):
        end = 2 * tiles + 3 * bisect_left(starts, tiles)
        wanted = [0]  # work items
        while costs[wanted[-1]] + most < end:
            wanted.append(bisect_right(costs, costs[wanted[-1]] + most) - 1)
        assert begins[:count] == [starts[unit] for unit in wanted], (tiles, most)
    assert [count for count, *_ in found.tolist()[-3:]] == [14, 16, 16]
