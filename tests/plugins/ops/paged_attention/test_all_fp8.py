"""Engines in which every token has FP8 products: which kernels a step launches, and that each row
is computed by one of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.attention import FP8, INT8, Part
from support.attention_steps import limits_of, needed, on_no_device, shapes_within
from support.fp8_attention import AllFp8World

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv
from llmctl.plugins.ops.paged_attention import kernel, reference
from llmctl.plugins.ops.paged_attention.chunk_fp8 import chunk_fp8
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import KEYS
from llmctl.plugins.ops.paged_attention.shared.source_specs import SHORT

MODEL = {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "lengths": (900, 900)}
CHUNKS, FEW = ["images_fp8", "chunk_fp8"], ["few_fp8"]


def launches_of(world: AllFp8World, parts: list[Part], **bounds: int) -> list[Launch]:
    step = world.step(parts)
    env = replace(world.env(step), use_pdl=True)
    return kernel.launches(world.call(parts), env, world.shape(step, **bounds))


def entries(found: list[Launch]) -> list[str]:
    return [each.spec.entry for each in found]


def least_of(launch: Launch) -> int:
    """`min_tokens` of images_fp8.cu."""
    least = launch.arguments[9]
    assert isinstance(least, int)
    return least


@pytest.mark.parametrize(
    ("counts", "wanted", "least"),
    [
        ((1,), FEW, None),
        ((SHORT,), FEW, None),
        ((1,) * 64, FEW, None),
        ((11,) * 8 + (1,), FEW, None),
        ((SHORT + 1,), CHUNKS, 1),
        ((700,), CHUNKS, 1),
        ((SHORT + 1, 1), CHUNKS + FEW, SHORT + 1),
        ((600, 11, 1), CHUNKS + FEW, SHORT + 1),
        ((20, 30, 300), CHUNKS + FEW, SHORT + 1),
    ],
)
def test_short_requests_and_chunks_have_a_kernel_each(counts, wanted, least):
    world = AllFp8World(**MODEL, max_seq_len=4096)
    parts: list[Part] = [(0, 900 - count, count) for count in counts]
    found = launches_of(world, parts)
    assert entries(found) == wanted
    if least is not None:
        assert least_of(found[0]) == least
    built = kernel.kernels(world.call(parts), world.limits())
    assert all(each.spec in built for each in found)


@pytest.mark.parametrize("bound", [0, 32, 1024])
@pytest.mark.parametrize("counts", [(3, 20, 1), (17, 1), (18, 17), (40,), (9,), (256, 300, 2)])
def test_every_row_is_one_kernels_whatever_a_captured_step_may_hold(counts, bound):
    """By what the kernels take: requests of at least `min_tokens`, and of up to `short` tokens."""
    world = AllFp8World(**MODEL)
    found = launches_of(
        world,
        [(0, 0, count) for count in counts],
        max_query_len=max(*counts, bound),
        num_tokens=sum(counts) + bound,
    )
    served = dict.fromkeys(range(len(counts)), 0)
    for launch in found:
        for request, count in enumerate(counts):
            if launch.spec.entry == "few_fp8":
                served[request] += count <= SHORT
            elif launch.spec.entry == "chunk_fp8":
                served[request] += count >= launch.arguments[15]
    assert set(served.values()) == {1}


def test_there_is_no_other_kernel_and_every_step_within_limits_finds_its_own():
    world = AllFp8World(64, 8, 128, (64,), kv_dtype=FP8)
    call, step = world.call([(0, 0, 1)]), world.env(world.step([(0, 0, 1)])).step
    kinds: set[str] = set()
    for numbers in product((1, 6, 64), (8, 64, 2048), (60, 1100, 20000), (0, 5, 40)):
        limits = replace(limits_of(world, *numbers), fp8_generation=True)
        assert not limits.takes_trees
        env = LaunchEnv(step, world.cache, limits, "tokens", on_no_device)
        built = needed(kernel.kernels(call, limits))
        for shape in shapes_within(limits):
            names = needed([launch.spec for launch in kernel.launches(call, env, shape)])
            assert names and names <= built, (limits, shape, names - built)
        kinds |= {name.split(".")[1] for name in built}
    assert kinds == {"images_fp8", "chunk_fp8", "few_fp8"}


def test_a_tree_has_no_kernel():
    world = AllFp8World(**MODEL)
    with pytest.raises(AssertionError, match="a tree for kernels of chains"):
        launches_of(world, [(0, 0, 5)], max_tree_len=5)


@pytest.mark.parametrize(
    ("tokens", "requests", "short", "context", "turns"),
    [
        (2048, 1, 0, 32768, [(8, 1)]),
        (18, 1, 0, 900, [(8, 1)]),
        (2048, 64, 63, 32768, [(8, 1)]),  # one prompt beside many that generate
        (2048, 64, 60, 32768, [(8, 2)] * 2),
        (360, 20, 0, 2048, [(8, 20)]),  # chains of 17 drafts
        (360, 20, 0, 16384, [(8, 4)] * 5),
        (2048, 3, 0, 131072, [(4, 1)] * 6),
    ],
)
def test_a_chunk_is_a_request_of_more_than_a_few_tokens(tokens, requests, short, context, turns):
    world = AllFp8World(**{**MODEL, "max_seq_len": 131072}, max_batch_size=64)
    sizes = {"num_tokens": tokens, "max_query_len": max(tokens // requests, 18)}
    found = launches_of(
        world,
        [(0, 0, 700)],
        num_requests=requests,
        num_short=short,
        max_kv_len=context,
        **sizes,
    )
    pairs = [each for each in found if each.spec.entry in CHUNKS]
    seen, places = [], set()
    for written, read in zip(pairs[0::2], pairs[1::2], strict=True):
        room = written.arguments[6]
        tiles, first_head, heads, first_chunk, chunks = written.arguments[-5:]
        assert read.arguments[-6:] == (room, tiles, first_head, heads, first_chunk, chunks)
        assert tiles * KEYS >= context
        assert chunks * heads * tiles * 2 * KEYS * 128 <= room.numel()
        seen.append((heads, chunks))
        places |= set(
            product(range(first_chunk, first_chunk + chunks), range(first_head, first_head + heads))
        )
    assert seen == turns
    assert places == set(product(range(requests - short), range(8)))


def test_of_the_last_layer_the_ends_of_chunks_are_computed():
    """By a binary of its own; images hold all keys."""
    last, other = AllFp8World(**MODEL, is_last=True), AllFp8World(**MODEL)
    call, limits = last.call([(0, 0, 1)]), last.limits()
    images, chunk = chunk_fp8.fp8_specs(call, limits)
    assert chunk.constants["ENDS"] == 32 and "ends32" in chunk.name, "17 tokens, of blocks of 16"
    assert "ENDS" not in images.constants
    own = chunk_fp8.fp8_specs(other.call([(0, 0, 1)]), limits)
    assert images in own and chunk not in own and "ENDS" not in own[1].constants


@pytest.mark.parametrize(
    "other", [{"window": 100}, {"kv_dtype": INT8}, {"size": 64}, {"tokens_per_block": 24}], ids=str
)
def test_what_they_cannot_compute_is_refused_when_an_engine_is_built(other):
    world = AllFp8World(**{**MODEL, **other})
    with pytest.raises(Unsupported, match="no kernel multiplies as FP8 numbers"):
        kernel.kernels(world.call([(0, 0, 1)]), world.limits())


def test_the_reference_has_one_arithmetic_for_a_token_in_any_step():
    """In a prompt, verified or generated; and it is that of prompts with FP8 products."""
    world = AllFp8World(heads=2, kv_heads=1, size=128, kv_dtype=FP8, lengths=(300, 200))

    def rows(parts: list[Part]) -> list[torch.Tensor]:
        step, call = world.step(parts), world.call(parts)
        reference.reference(call.inputs, call.outputs, call.attributes, step, world.cache)
        return list(call.outputs["out"].split([count for *_, count in parts]))

    whole, beside = rows([(0, 0, 300), (1, 0, 200)])
    assert torch.equal(rows([(1, 199, 1)])[0], beside[199:])
    assert torch.equal(rows([(0, 290, 10), (1, 3, 1)])[0], whole[290:])
    assert torch.equal(rows([(0, 77, 40)])[0], whole[77:117])
