"""The kernels for prompts with FP8 products: what they compile to, and which steps they serve."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.attention import FP8, INT8, Part, World
from support.fp8_attention import Fp8World
from support.kernel import disassemble

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.ops.paged_attention import kernel, reference
from llmctl.plugins.ops.paged_attention.chunk_fp8 import chunk_fp8
from llmctl.plugins.ops.paged_attention.chunk_fp8.reference import CHAIN, KEYS, MOST_UNIT, UNIT
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP, context_end
from llmctl.plugins.ops.paged_attention.shared.tiles import unit_start

MODEL = {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "lengths": (700, 333)}
PROMPT: list[Part] = [(0, 0, 700)]


def launches_of(world: World, parts: list[Part], **bounds: int) -> list[Launch]:
    """What a step launches on a GPU."""
    step = world.step(parts)
    env = replace(world.env(step), use_pdl=True)
    return kernel.launches(world.call(parts), env, world.shape(step, **bounds))


@pytest.mark.parametrize(
    ("heads", "page", "quantize_out"),
    [((64, 8), 32, True), ((9, 3), 8, False), ((7, 1), 1024, True)],
)
def test_products_are_in_flight_beside_others_and_sums_in_registers(heads, page, quantize_out):
    world = Fp8World(
        *heads, 128, (64,), kv_dtype=FP8, tokens_per_block=page, quantize_out=quantize_out
    )
    for spec in chunk_fp8.fp8_specs(world.call([(0, 0, 1)]), world.limits()):
        binary = compile_kernel(spec)
        assert binary.local_bytes == 0, "registers spill"
        if spec.entry == "chunk_fp8":
            code = disassemble(binary)
            # For the first tile, and for every other one logits, values, and values of the last.
            assert code.count("WARPGROUP.DEPBAR") == 4, "products wait for each other"
            assert code.count("QGMMA") == 16


def test_copies_alone_write_the_rings():
    """No queries are in shared memory. When 16-bit ones were stored as chunk.cu stores them, they
    were stored over the first keys, after these had arrived where a warp was late: mostly in an
    engine's first prompt, whose bits then were others each time."""
    world = Fp8World(64, 8, 128, (64,), kv_dtype=FP8, quantize_out=True)
    _, spec = chunk_fp8.fp8_specs(world.call([(0, 0, 1)]), world.limits())
    code = disassemble(compile_kernel(spec))
    assert len(re.findall(r"\bUBLKCP", code)) == 2, "keys and values"
    assert not re.findall(r"\bLDG[\w.]*128", code), "16-bit queries of the loading warps"
    # Besides the dimension of ones, what is merged: 64 sums of a thread, and four other numbers.
    assert len(re.findall(r"\bSTS\.128", code)) == 1 + (64 + 4) // 4


def test_a_prompt_has_both_kernels_and_others_have_theirs():
    world = Fp8World(**MODEL, max_seq_len=4096)
    call = world.call(PROMPT)
    built = kernel.kernels(call, world.limits())
    found = launches_of(world, PROMPT)
    assert [each.spec.entry for each in found] == ["images_fp8", "chunk_fp8", "chunk"]
    assert all(each.spec in built for each in found)
    assert found[2].spec.constants["HAS_CONTEXT"] == 1 and not found[2].spec.constants["IMAGES"]
    beside = launches_of(world, [(0, 0, 600), *[(1, 300, 1)] * 3])
    assert [each.spec.entry for each in beside] == ["images_fp8", "chunk_fp8", "chunk", "batch"]
    short = launches_of(world, [(0, 100, 11)])
    assert [each.spec.entry for each in short] == ["verification"]
    # Fewer tokens than a group: those of a prompt's end, or of one that pauses.
    end = launches_of(world, [(0, 512, 188)])
    assert [each.spec.entry for each in end] == ["chunk"]
    assert "images" not in {spec.entry for spec in built}


def test_long_chains_of_rounds_have_16_bit_products_whatever_a_prompt_left():
    """Rounds on the device do not write `context_end`, and have fewer tokens than a group."""
    world = Fp8World(**MODEL, context_ends={0: 256, 1: 256})
    for parts, is_prompt in (
        ([(0, 100, 200), (1, 0, 20)], False),
        ([(0, 100, 255)], False),
        ([(0, 0, 256), (1, 0, 20)], True),
    ):
        found = launches_of(world, parts)
        (chunk,) = [each for each in found if each.spec.entry == "chunk"]
        assert ("chunk_fp8" in {each.spec.entry for each in found}) == is_prompt
        ends = chunk.arguments[-1]
        assert isinstance(ends, torch.Tensor) and bool(ends.any()) == is_prompt
        assert len(ends) >= len(parts) and (is_prompt or len(ends) == 64)


def test_the_last_layer_computes_no_tokens_with_fp8_products():
    """A prompt's last token, which gets logits, is never one; nothing reads the others there."""
    sizes = (1, 255, 256, 257, 512, 700, 2048)
    assert all(context_end(count) < count for count in sizes)
    last = Fp8World(**MODEL, max_seq_len=4096, is_last=True)
    built = kernel.kernels(last.call(PROMPT), last.limits())
    assert not {"images_fp8", "chunk_fp8"} & {spec.entry for spec in built}
    for parts, wanted in (
        (PROMPT, ["chunk"]),
        ([(0, 0, 256)], ["chunk"]),
        ([(0, 0, 600), *[(1, 300, 1)] * 3], ["chunk", "batch"]),
    ):
        found = launches_of(last, parts)
        assert [each.spec.entry for each in found] == wanted
        assert all(each.spec in built for each in found)
    constants = found[0].spec.constants
    assert constants["HAS_CONTEXT"] == 1 and constants["ENDS"] == 32


def test_other_engines_have_neither():
    world = World(**MODEL)
    built = kernel.kernels(world.call(PROMPT), world.limits())
    assert not {"images_fp8", "chunk_fp8"} & {spec.entry for spec in built}
    assert all("HAS_CONTEXT" not in spec.constants for spec in built)


@pytest.mark.parametrize(
    ("tokens", "requests", "context", "turns"),
    [
        (2048, 1, 2048, [(8, 1)]),
        (2048, 1, 32768, [(8, 1)]),
        (2048, 1, 131072, [(4, 1)] * 2),
        (8192, 40, 2048, [(8, 32)]),
        (8192, 40, 4096, [(8, 16)] * 2),
        (8192, 3, 131072, [(4, 1)] * 6),
        (2048, 8, 32768, [(8, 2)] * 4),
        (600, 5, 32768, [(8, 2)]),
        (600, 1, 3000, [(8, 1)]),
    ],
)
def test_operands_of_some_heads_and_requests_are_written_at_a_time(
    tokens, requests, context, turns
):
    world = Fp8World(**{**MODEL, "max_seq_len": 131072}, max_batch_size=64)
    sizes = {"num_tokens": tokens, "max_query_len": tokens, "max_kv_len": context}
    found = launches_of(world, PROMPT, num_requests=requests, num_single=0, **sizes)
    pairs = [each for each in found if each.spec.entry in ("images_fp8", "chunk_fp8")]
    assert found[len(pairs)].spec.entry == "chunk", "the rest of the prompts comes last"
    seen, places = [], set()
    for written, read in zip(pairs[0::2], pairs[1::2], strict=True):
        assert (written.spec.entry, read.spec.entry) == ("images_fp8", "chunk_fp8")
        room = written.arguments[6]
        tiles, first_head, heads, first_chunk, chunks = written.arguments[-5:]
        assert read.arguments[-6:] == (room, tiles, first_head, heads, first_chunk, chunks)
        assert tiles * KEYS >= context
        assert chunks * heads * tiles * 2 * KEYS * 128 <= room.numel()
        seen.append((heads, chunks))
        own = set(
            product(range(first_chunk, first_chunk + chunks), range(first_head, first_head + heads))
        )
        assert not own & places
        places |= own
    assert seen == turns
    assert places == set(product(range(min(requests, tokens // GROUP)), range(8)))


def test_the_memory_plan_knows_of_the_room_for_operands():
    """Also where the longest context has no room but for a head at a time."""
    for longest, wanted in ((1024, 64 << 20), (32768, 128 << 20), (1 << 20, 256 << 20)):
        world = Fp8World(**{**MODEL, "max_seq_len": longest}, max_batch_size=64)
        launches_of(world, PROMPT, max_kv_len=longest)
        assert world.scratch["paged_attention.images_fp8.h8"].numel() == wanted


@pytest.mark.parametrize(
    "other",
    [
        {"window": 100},
        {"kv_dtype": INT8},
        {"kv_dtype": torch.bfloat16},
        {"size": 64},
        {"tokens_per_block": 24},
        {"max_batch_size": 5000},
    ],
    ids=str,
)
def test_what_they_cannot_compute_is_refused_when_an_engine_is_built(other):
    world = Fp8World(**{**MODEL, **other})
    with pytest.raises(Unsupported, match="no kernel multiplies as FP8 numbers") as refused:
        kernel.kernels(world.call(PROMPT), world.limits())
    assert refused.value.fix == "build with --use_fp8_context_fmha disable"


def test_chains_of_products_are_short_and_work_items_are_whole_chains():
    """512 keys at most, and powers of two of tiles, as headers want."""
    assert KEYS * CHAIN == 512
    assert UNIT % CHAIN == 0 and UNIT.bit_count() == 1 and MOST_UNIT.bit_count() == 1
    starts = [unit_start(unit, MOST_UNIT, UNIT) for unit in range(40)]
    assert starts[:17] == [*range(0, 129, 8)] and starts[16:] == [*range(128, 497, 16)]


def test_shared_memory_has_room_for_requests_and_some_tiles():
    for requests in (1, 64, chunk_fp8.MOST_REQUESTS):
        world = Fp8World(**MODEL, max_batch_size=requests)
        spec = chunk_fp8.chunk_fp8_spec(world.call(PROMPT), world.limits())
        assert int(spec.constants["STAGES"]) >= 2 and spec.shared_bytes <= HOPPER.max_shared_bytes


def test_the_reference_has_both_kinds_of_rows():
    """Rows before the end are those of fp8_reference, the others exact; so are other requests."""
    world = Fp8World(
        heads=2, kv_heads=1, size=128, kv_dtype=FP8, lengths=(600, 300), context_ends={0: 512}
    )
    plain = World(heads=2, kv_heads=1, size=128, kv_dtype=FP8, lengths=(600, 300))
    parts: list[Part] = [(0, 256, 344), (1, 0, 300)]
    found = []
    for each in (world, plain):
        step, call = each.step(parts), each.call(parts)
        reference.reference(call.inputs, call.outputs, call.attributes, step, each.cache)
        found.append(call.outputs["out"])
    own, exact = (rows.float() for rows in found)
    assert torch.equal(own[256:], exact[256:])
    error = (own[:256] - exact[:256]).norm() / exact[:256].norm()
    assert 0.01 < error < 0.08
