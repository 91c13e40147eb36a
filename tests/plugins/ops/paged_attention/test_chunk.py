"""The CUDA C++ kernel for context chunks: what it compiles to, and which steps it serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention import FP8, INT8, Part, World
from support.attention_compiled import CHUNKS_HERE, check_chunk

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import (
    compile_kernel,
    is_needed,
)
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.chunk import chunk

MODEL = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (700, 333), "kv_dtype": FP8}
PROMPT: list[Part] = [(0, 0, 700)]


def launches_of(world: World, parts: list[Part]) -> list[Launch]:
    """What a step launches on a GPU."""
    step = world.step(parts)
    env = replace(world.env(step), use_pdl=True)
    return kernel.launches(world.call(parts), env, world.shape(step))


@pytest.mark.parametrize(("heads", "kv"), CHUNKS_HERE, ids=str)
def test_it_keeps_sums_in_registers_and_products_in_flight(kv, heads):
    check_chunk(heads, kv)


@pytest.mark.parametrize(
    ("tokens_per_block", "kv_dtype"),
    [(2, FP8), (2, torch.bfloat16), (8, FP8), (128, torch.bfloat16)],
    ids=str,
)
def test_it_compiles_for_every_page_size(tokens_per_block, kv_dtype):
    """With 16 it has the registers that it has with 8, with 64 those of 128."""
    world = World(8, 2, 128, (64,), kv_dtype=kv_dtype, tokens_per_block=tokens_per_block)
    call, limits = world.call([(0, 0, 1)]), world.limits()
    for spec in (chunk.chunk_spec(call, limits), chunk.images_spec(call, limits)):
        assert compile_kernel(spec).local_bytes == 0


@pytest.mark.parametrize("requests", [1, 64, 1000, 4096])
def test_its_shared_memory_has_room_for_requests_and_some_tiles(requests):
    world = World(**MODEL, max_batch_size=requests)
    spec = chunk.chunk_spec(world.call(PROMPT), world.limits())
    stages = spec.constants["STAGES"]
    assert isinstance(stages, int) and stages >= 3
    assert spec.shared_bytes <= HOPPER.max_shared_bytes
    assert spec.shared_bytes >= (4 + 2 * stages) * 64 * 128 * 2 + 16 * (requests + 1)


@pytest.mark.parametrize(("drafts", "kept"), [(0, 16), (15, 16), (16, 32), (120, 128)])
def test_where_only_ends_are_read_it_computes_whole_blocks_with_every_draft(drafts, kept):
    world = World(**MODEL)
    call, limits = world.call(PROMPT), replace(world.limits(), max_draft_len=drafts)
    ends = replace(call, attributes={**call.attributes, "ends_only": True})
    plain, short = chunk.chunk_spec(call, limits), chunk.chunk_spec(ends, limits)
    assert "ENDS" not in plain.constants and short.constants["ENDS"] == kept
    assert plain.name != short.name and compile_kernel(short).local_bytes == 0
    assert short in kernel.kernels(ends, limits) and plain not in kernel.kernels(ends, limits)


def test_it_serves_chunks_and_what_is_beside_them():
    world = World(**MODEL)
    built = kernel.kernels(world.call(PROMPT), world.limits())
    (alone,) = launches_of(world, PROMPT)
    assert alone.spec.entry == "chunk" and alone.spec in built
    assert alone.grid == (world.limits().num_sms, 1, 1)
    beside = launches_of(world, [(0, 0, 600), *[(1, 300, 1)] * 3])
    assert [each.spec.entry for each in beside] == ["chunk", "batch"]
    needed = [spec for spec in built if is_needed(spec, HOPPER.capability)]
    assert all(each.spec in needed for each in (alone, *beside))
    (triton,) = [spec for spec in built if spec.unused_on]
    assert triton.source.endswith("triton.context:context") and is_needed(triton, "8.9")
    assert not is_needed(triton, HOPPER.capability), "an engine for Hopper would never launch it"
    (short,) = launches_of(world, [(0, 0, 18)])
    assert short.grid == (16, 1, 1)  # an item for each KV head, and those that a request may add


@pytest.mark.parametrize(
    "other",
    [
        {"window": 100},
        {"kv_dtype": INT8},
        {"size": 64},
        {"size": 96},
        {"tokens_per_block": 24},
        {"max_batch_size": 5000},
    ],
    ids=str,
)
def test_what_it_does_not_cover_stays_with_the_triton_kernel(other):
    world = World(**{**MODEL, **other})
    launches = launches_of(world, PROMPT)
    assert launches[0].spec.source.endswith("triton.context:context")
    assert all(spec.entry != "chunk" for spec in kernel.kernels(world.call(PROMPT), world.limits()))


LONG = {**MODEL, "lengths": (600,), "max_seq_len": 131072}


@pytest.mark.parametrize(
    ("tokens", "requests", "single", "context", "passes"),
    [
        (2048, 1, 0, 2048, 1),
        (2048, 1, 0, 32768, 1),
        (2048, 1, 0, 65536, 2),
        (2048, 1, 0, 131072, 4),
        (2048, 3, 0, 32768, 4),
        (2048, 33, 0, 32768, 0),  # no room for one head of all
        (2048, 33, 0, 2048, 0),  # three turns
        (2048, 33, 32, 32768, 1),  # those that generate need none
        (2048, 35, 32, 32768, 4),
        (2048, 1, 0, 1536, 0),
        (128, 1, 0, 32768, 0),  # few blocks of rows: each tile would be read a few times
    ],
)
def test_tiles_are_converted_before_some_heads_at_a_time(tokens, requests, single, context, passes):
    world = World(**LONG, max_batch_size=64)
    parts: list[Part] = [(0, 0, 600)]
    call, step = world.call(parts), world.step(parts)
    sizes = {"num_tokens": tokens, "max_query_len": tokens, "max_kv_len": context}
    shape = world.shape(step, num_requests=requests, num_single=single, **sizes)
    env = replace(world.env(step), use_pdl=True)
    found = kernel.launches(call, env, shape)
    names = [each.spec.entry for each in found if each.spec.entry in ("images", "chunk")]
    assert names == (["images", "chunk"] * passes or ["chunk"])
    if not passes:
        return
    heads = 0
    for written, read in zip(found[0::2], found[1::2], strict=False):
        *_, room, _, count, _, tiles, first, num_heads = written.arguments
        assert read.arguments[-4:] == (room, tiles, first, num_heads) and count == requests
        assert first == heads and tiles * 64 >= context
        assert (
            (requests - single) * tiles * num_heads * 2 * 64 * 128 * 2 <= room.numel() <= 128 << 20
        )
        heads += num_heads
    assert heads == 8
    built = kernel.kernels(call, world.limits())
    assert all(each.spec in built for each in found)


@pytest.mark.parametrize("longest", [1024, 4096, 131072, 1 << 20])
def test_the_memory_plan_knows_of_the_room_for_converted_tiles(longest):
    """Also where only shorter contexts than the longest have room."""
    world = World(**{**LONG, "max_seq_len": longest}, max_batch_size=64)
    parts: list[Part] = [(0, 0, 600)]
    step = world.step(parts)
    env = replace(world.env(step), use_pdl=True)
    shape = world.shape(step, num_tokens=2048, max_query_len=2048, max_kv_len=longest)
    kernel.launches(world.call(parts), env, shape)
    room = world.scratch["paged_attention.images.h8"].numel()
    assert room == {1024: 0, 4096: 16 << 20}.get(longest, 128 << 20)
