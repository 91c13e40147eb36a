"""images_fp8.cu and chunk_fp8.cu with their threads on a CPU, whose products are those of tensor
cores: the numbers of the reference, and the same bits whatever is beside a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support import emulated_warps
from support.attention import FP8, Part, World, same_bits
from support.fp8_attention import AllFp8World, Fp8World

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import launch_arguments
from llmctl.plugins.ops.paged_attention.chunk_fp8 import chunk_fp8
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import KEYS
from llmctl.plugins.ops.paged_attention.reference import reference

LENGTHS, ENDS = (600, 290, 40, 2400), {0: 512, 1: 256, 3: 2304}
NAN = 0x7F


def world_of(**sizes: object) -> Fp8World:
    """What is in no request's cache is no number."""
    made = {"heads": 2, "kv_heads": 1, "spread": 2.0, "quantize_out": False}
    made |= {"lengths": LENGTHS, "context_ends": ENDS, **sizes}
    world = Fp8World(**made, size=128, kv_dtype=FP8, max_batch_size=8)
    world.fill_unused(NAN)
    return world


def attend(world: World, parts: Sequence[Part], seed: int, blocks: int) -> list[torch.Tensor]:
    """Rows of the parts by so many thread blocks, copies done early or late."""
    step, call = world.step(parts), world.call(parts, 3)
    env = world.env(step, 2)
    shape = world.shape(step, num_tokens=step.num_tokens + 3, num_requests=len(parts) + 2)
    counters = launch_arguments.partials(call, env)[1]
    found = chunk_fp8.fp8_launches(
        *(call, env, shape, launch_arguments.own_tensors(call, env), counters),
        *(launch_arguments.logit_scale(call), 18),
    )
    few: list[Launch] = [replace(each, grid=(blocks, 1, 1)) for each in found]
    emulated_warps.run(few, seed, is_late=seed % 2 == 0)
    assert not counters.any(), "a counter is not back at zero"
    return list(call.outputs["out"][: step.num_tokens].split([count for *_, count in parts]))


def wanted_of(world: Fp8World | AllFp8World, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Those of the reference, 0x55 where 16-bit products would be."""
    step, call = world.step(parts), world.call(parts)
    cache = world.cache.clone()
    cache.view(torch.uint8)[cache.view(torch.uint8) == NAN] = 0
    reference(call.inputs, call.outputs, call.attributes, step, cache)
    rows = list(call.outputs["out"].split([count for *_, count in parts]))
    if isinstance(world, AllFp8World):
        return rows
    for (request, start, _), own in zip(parts, rows, strict=True):
        own[max(world.context_ends.get(request, 0) - start, 0) :].view(torch.uint8).fill_(0x55)
    return rows


def everywhere(**sizes: object) -> AllFp8World:
    """An engine in which every token has FP8 products."""
    sizes = {"heads": 2, "kv_heads": 1, "spread": 2.0, "lengths": LENGTHS[:3], **sizes}
    world = AllFp8World(**sizes, size=128, kv_dtype=FP8, max_batch_size=8)
    world.fill_unused(NAN)
    return world


def agree(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """But for powers of two, which two libraries compute."""
    for own, right in zip(found, wanted, strict=True):
        assert (own.view(torch.uint8) == right.view(torch.uint8)).float().mean() > 0.999
        torch.testing.assert_close(own.float(), right.float(), rtol=0.02, atol=0.01)


MANY: list[Part] = [(2, 0, 40), (0, 0, 512), (2, 39, 1), (1, 0, 290)]


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tokens_per_block": 8, "quantize_out": True}, {"heads": 3, "dtype": torch.float16}],
    ids=str,
)
def test_requests_of_a_step_have_the_numbers_of_the_reference(sizes):
    world = world_of(**sizes)
    parts: list[Part] = [(2, 0, 40), (0, 256, 260), (2, 39, 1), (1, 0, 290)]
    agree(attend(world, parts, 1, 2), wanted_of(world, parts))


def test_work_items_of_several_tiles_have_the_numbers_of_the_reference():
    """And the last rows of a step, which are chunk.cu's, are not written."""
    world = world_of(heads=1)
    parts: list[Part] = [(3, 2048, 300)]
    agree(attend(world, parts, 2, 1), wanted_of(world, parts))


def test_work_items_of_several_chains_have_the_numbers_of_the_reference():
    """Of 8 tiles from tile 64 on, and of 16 from tile 128 on: rows whose last chain is the first of
    its work item, and some whose last is the second."""
    world = everywhere(heads=1, lengths=(148 * KEYS + 60,))
    parts: list[Part] = [(0, 72 * KEYS + 100, 20), (0, 148 * KEYS + 40, 20)]
    agree(attend(world, parts, 1, 2), wanted_of(world, parts))


@pytest.mark.parametrize(
    ("seed", "blocks", "room"), [(2, 1, 1 << 27), (3, 5, 1 << 27), (4, 2, 9 << 16), (5, 3, 1)]
)
def test_the_same_bits_in_any_step_and_turn(seed, blocks, room, monkeypatch):
    """Turns: some requests, or one head of one at a time, have room for operands."""
    world = world_of(kv_heads=2)  # a query head each
    whole = attend(world, MANY, 1, 2)
    monkeypatch.setattr(chunk_fp8, "_IMAGE_BYTES", room)
    world.scratch = {}
    for same, right in zip(attend(world, MANY, seed, blocks), whole, strict=True):
        assert same_bits(same, right)
    alone: list[Part] = [(0, 256, 344)]
    (rows,) = attend(world, alone, seed, blocks)
    assert same_bits(rows[:256], whole[1][256:])
    assert (rows[256:].view(torch.uint8) == 0x55).all(), "another kernel's rows"


def test_where_every_token_has_them_chunks_end_anywhere():
    """Requests of more than a few tokens, of any number, and whoever has fewer is another
    kernel's."""
    world = everywhere()
    parts: list[Part] = [(2, 0, 40), (0, 256, 277), (2, 39, 1), (1, 272, 18)]
    found = attend(world, parts, 1, 2)
    step, call = world.step(parts), world.call(parts)
    cache = world.cache.clone()
    cache.view(torch.uint8)[cache.view(torch.uint8) == NAN] = 0
    reference(call.inputs, call.outputs, call.attributes, step, cache)
    wanted = list(call.outputs["out"].split([count for *_, count in parts]))
    wanted[2].view(torch.uint8).fill_(0x55)
    agree(found, wanted)
    (whole,) = attend(world, [(1, 0, 290)], 2, 3)
    assert same_bits(whole[272:], found[3])


def test_of_the_last_layer_the_last_tokens_have_their_bits():
    """Blocks of 64 tokens: of those before, none is written."""
    found, wanted = (
        attend(everywhere(is_last=is_last), [(0, 256, 300), (1, 0, 290)], 1, 2)
        for is_last in (True, False)
    )
    for own, whole in zip(found, wanted, strict=True):
        assert same_bits(own[-64:], whole[-64:])
        assert (own[:-64].view(torch.uint8) == 0x55).all()
