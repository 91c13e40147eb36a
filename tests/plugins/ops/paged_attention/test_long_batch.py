"""The attention kernel of chains of 65 to 88 rows of several requests with long contexts: what it
compiles to, which steps it serves, and how it divides them. test_long_emulated.py
and tests/gpu compare its bits."""

from __future__ import annotations

import re

import pytest
from support.attention import FP8, World, short_launch
from support.kernel import compile_all

from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.long_batch import long_batch

WIDE = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (64, 64), "kv_dtype": FP8}
NARROW = {**WIDE, "heads": 32}
CONTEXT = 32_768


def world_of(sizes: dict[str, object], **limits: int) -> World:
    """One whose engine verifies 10 drafts and takes requests of up to 40,000 tokens."""
    return World(**{**sizes, "max_seq_len": 40_000, "trees": {1: [-1] * 10}, **limits})


def found(world: World, requests: int, tokens: int, context: int = CONTEXT) -> tuple[int, ...]:
    """Rows of a thread block and the grid of long_batch.cu's launch; empty if another kernel serves
    the step."""
    launch = short_launch(world, requests, tokens, context)
    is_it = launch.spec.entry == "attend_long_batch"
    return (int(launch.spec.constants["ROWS"]), *launch.grid) if is_it else ()


def test_sums_stay_in_registers_and_products_follow_each_other():
    world = world_of({**WIDE, "quantize_out": True})
    specs = long_batch.long_batch_specs(world.call([(0, 0, 1)]), world.limits())
    assert [spec.constants["ROWS"] for spec in specs] == [48, 88]
    for spec, binary, code in compile_all(specs):
        # Of 384 threads each has 168 registers, which are a few short.
        assert binary.local_bytes <= (0 if spec.constants["STREAMS"] == 2 else 64), spec.name
        # Logits of a warpgroup's first tile and of the next, values: eight each.
        assert len(re.findall(r"\bHGMMA", code)) == 24
        # A compiler that cannot tell that registers are free waits after every product.
        assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 2
        assert "LDGSTS" in code and "LDSM" in code and "F2FP.F16.E4M3" in code
        assert "ACQBULK" in code and "PREEXIT" in code, "launches are ordered"
        assert binary.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("requests", "wanted"),
    [(16, (88, 1, 8, 16)), (64, (88, 1, 8, 64))],
)
def test_steps_are_divided_as_was_fastest(requests, wanted):
    """On an H200, 32,768 tokens of context each."""
    assert found(world_of(WIDE), requests, 11) == wanted


def test_other_steps_are_those_of_other_kernels():
    world = world_of(WIDE)
    assert found(world, 8, 11, batch.LONG) == ()
    assert found(world, 1, 11) == (), "one request"
    assert found(world, 8, 8) == found(world_of(NARROW), 8, 11) == (), "a warpgroup of long.cu"
    assert found(world, 16, 12) == (), "more rows than a thread block has"
    assert found(world_of({**WIDE, "tokens_per_block": 4}), 16, 11) == (), "small pages"
    assert found(world_of({**WIDE, "tokens_per_block": 8}), 16, 11)


@pytest.mark.parametrize(
    "sizes", [{"kv_dtype": World.kv_dtype}, {"size": 64}, {"window": 100}], ids=str
)
def test_what_it_does_not_cover_goes_to_other_kernels(sizes):
    world = world_of({**WIDE, **sizes})
    assert found(world, 8, 11) == ()
    assert not long_batch.long_batch_specs(world.call([(0, 0, 1)]), world.limits())


def test_engines_hold_the_binaries_that_their_steps_reach():
    def rows(**limits: int) -> list[int]:
        world = world_of(WIDE, **limits)
        specs = long_batch.long_batch_specs(world.call([(0, 0, 1)]), world.limits())
        return [int(spec.constants["ROWS"]) for spec in specs]

    assert rows() == [48, 88]
    assert rows(max_seq_len=batch.LONG) == rows(max_batch_size=1) == []
    assert rows(heads=32) == [48, 88], "17 tokens"
    assert rows(heads=16) == []


def test_more_entries_are_never_needed():
    for splits in (2, 3, 16):
        most = [long_batch.most_entries(tiles, splits) for tiles in range(600)]
        assert most == sorted(most) and most[0] == 1
        assert most[512] <= 90, "work items of 32,768 tokens are 88"
