"""The attention kernel of several requests with long contexts: what it compiles to, which steps it
serves, and how it divides them. test_paged_attention_long_batch_emulated.py and tests/gpu compare
its bits."""

from __future__ import annotations

import re

import pytest
from support.attention import FP8, World, changed, short_launch
from support.kernel import compile_all

from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepShape
from llmctl.plugins.ops.paged_attention import batch, kernel, long_batch

WIDE = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (64,), "kv_dtype": FP8}
NARROW = {**WIDE, "heads": 32}
CONTEXT = 32_768


def world_of(sizes: dict[str, object], tree: int = 0, **limits: int) -> World:
    """One whose engine takes requests of up to 40,000 tokens."""
    trees = {0: [-1] * (tree - 1)} if tree else {}
    return World(**{**sizes, "max_seq_len": 40_000, "trees": trees, **limits})


def found_in(launch: Launch) -> tuple[int, ...]:
    """Rows of a thread block and the grid of long_batch.cu's launch; empty if another kernel serves
    the step."""
    is_it = launch.spec.entry == "attend_long_batch"
    return (int(launch.spec.constants["ROWS"]), *launch.grid) if is_it else ()


def of_trees(world: World, requests: int, tokens: int) -> tuple[int, ...]:
    shape = StepShape(requests * tokens, requests, 1, tokens, CONTEXT, tokens)
    step = world.step([(0, 0, min(tokens, 64))])
    env = changed(world.env(step), use_pdl=True)
    (launch,) = kernel.launches(world.call([(0, 0, 1)]), env, shape)
    return found_in(launch)


@pytest.mark.parametrize("sizes", [WIDE, {**WIDE, "heads": 7, "kv_heads": 1}], ids=["70b", "7x1"])
def test_sums_stay_in_registers_and_products_follow_each_other(sizes):
    world = world_of({**sizes, "quantize_out": True}, tree=4)
    specs = long_batch.long_batch_specs(world.call([(0, 0, 1)]), world.limits())
    trees = [False, False, False] + [True, True, True] * (sizes["heads"] == 64)
    assert [spec.constants["TREE"] for spec in specs] == trees
    for spec, binary, code in compile_all(specs):
        # Of 384 threads each has 168 registers, which are a few short.
        assert binary.local_bytes <= (0 if spec.constants["STREAMS"] == 2 else 64), spec.name
        # Logits of a warpgroup's first tile and of the next, values: eight each.
        assert len(re.findall(r"\bHGMMA", code)) == 24
        # A compiler that cannot tell that registers are free waits after every product, which with
        # 128 rows it does (docs/performance/log/attention.md).
        waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
        assert waits == (2 if spec.constants["ROWS"] < 128 else 24)
        assert bool(re.search(r"\bHMMA", code)) == spec.constants["TREE"]
        assert "LDGSTS" in code and "LDSM" in code and "F2FP.F16.E4M3" in code
        assert "ACQBULK" in code and "PREEXIT" in code, "launches are ordered"
        assert binary.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("sizes", "requests", "tokens", "wanted"),
    [
        (WIDE, 1, 11, (88, 16, 8, 1)),  # 75 us; long.cu: 81
        (WIDE, 8, 11, (48, 1, 16, 8)),  # 432 us; 88 rows, half of the multiprocessors: 581
        (WIDE, 64, 11, (88, 1, 8, 64)),  # 2,390 us; 48 rows: 3,407
        (NARROW, 8, 11, (48, 2, 8, 8)),  # 283 us
        (NARROW, 64, 11, (48, 1, 8, 64)),
        (WIDE, 12, 16, (128, 1, 8, 12)),
        (WIDE, 4, 11, (88, 3, 8, 4)),  # a fourth share of each context would have no room
    ],
)
def test_steps_are_divided_as_was_fastest(sizes, requests, tokens, wanted):
    """On an H200, 32,768 tokens of context each."""
    assert found_in(short_launch(world_of(sizes), requests, tokens, CONTEXT)) == wanted


@pytest.mark.parametrize(
    ("sizes", "requests", "wanted"),
    [
        (WIDE, 2, (128, 4, 16, 2)),  # computed; two shares of 128 rows 518 us, of 88 rows 366
        (WIDE, 4, (88, 1, 24, 4)),  # 609 us; 128 rows: 881
        (WIDE, 8, (128, 1, 16, 8)),  # 874 us
        (WIDE, 64, (128, 1, 16, 64)),  # 7,038 us
        (NARROW, 4, (48, 1, 24, 4)),  # 487 us; 128 rows: 868
        (NARROW, 8, (88, 1, 16, 8)),  # 547 us; 128 rows: 868
        (NARROW, 64, (128, 1, 8, 64)),  # 3,504 us
    ],
)
def test_trees_are_divided_as_was_fastest(sizes, requests, wanted):
    """Trees of 32 tokens on an H200, 32,768 tokens of context each."""
    assert of_trees(world_of(sizes, tree=32), requests, 32) == wanted


def test_trees_of_more_tokens_than_its_keys_are_those_of_other_kernels():
    most = long_batch.MAX_TREE
    assert of_trees(world_of(WIDE, tree=most), 8, most)
    assert of_trees(world_of(WIDE, tree=most + 1), 8, most + 1) == ()


def test_other_steps_are_those_of_other_kernels():
    world = world_of(WIDE)
    assert found_in(short_launch(world, 8, 11, batch.LONG)) == ()
    assert found_in(short_launch(world, 1, 11, 24_576)) == (), "long.cu"
    assert found_in(short_launch(world, 1, 8, CONTEXT)) == (), "a warpgroup of long.cu"
    assert found_in(short_launch(world, 1, 12, CONTEXT)) == (), "more rows than were measured"
    assert found_in(short_launch(world, 1, 11, 8192)) == (), "generation.cu"
    assert found_in(short_launch(world, 8, 2, CONTEXT)) == (), "batch.cu"
    small_pages = world_of({**WIDE, "tokens_per_block": 4})
    assert short_launch(small_pages, 1, 11, CONTEXT).spec.entry == "attend_long"
    assert found_in(short_launch(world, 2, 11, 8192)) == (), "long.cu has room for their work items"
    assert of_trees(world_of(NARROW, tree=32), 1, 32) == ()


@pytest.mark.parametrize(
    "sizes",
    [{"kv_dtype": World.kv_dtype}, {"size": 64}, {"window": 100}, {"tokens_per_block": 4}],
    ids=str,
)
def test_what_it_does_not_cover_goes_to_other_kernels(sizes):
    world = world_of({**WIDE, **sizes}, tree=32)
    assert found_in(short_launch(world, 8, 11, CONTEXT)) == ()
    assert not long_batch.long_batch_specs(world.call([(0, 0, 1)]), world.limits())


def test_engines_hold_the_binaries_that_their_steps_reach():
    def rows(**limits: int) -> list[int]:
        world = world_of(WIDE, **limits)
        specs = long_batch.long_batch_specs(world.call([(0, 0, 1)]), world.limits())
        return [int(spec.constants["ROWS"]) for spec in specs]

    assert rows(max_seq_len=batch.LONG) == []
    assert rows(max_batch_size=1) == [88]
    assert rows(max_batch_size=1, max_seq_len=24_576) == rows(max_batch_size=1, heads=16) == []
    assert rows() == [48, 88, 128, 48, 88, 128]


def test_more_entries_are_never_needed():
    """Of any shorter context: what the second and later of its shares hold, and one."""
    for splits in (2, 3, 16):
        most = [long_batch.most_entries(tiles, splits, True) for tiles in range(600)]
        assert most == sorted(most) and most[0] == 1
        assert most[512] <= 90, "work items of 32,768 tokens are 88"
