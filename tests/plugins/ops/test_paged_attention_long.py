"""The attention kernel of verifications in long contexts: what it compiles to, which steps it
serves, and how it divides a context. tests/gpu compares its bits."""

from __future__ import annotations

import re

import pytest
from support.attention import FP8, World, changed, short_launch
from support.kernel import compile_all

from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.ops.paged_attention import batch, kernel, long
from llmctl.plugins.ops.paged_attention.tiles import count_units

WIDE = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (64,), "kv_dtype": FP8}
NARROW = {**WIDE, "heads": 32}


def world_of(sizes: dict[str, object], tree: int = 0, longest: int = 40_000) -> World:
    """One whose engine takes requests of up to `longest` tokens."""
    return World(
        **{**sizes, "max_seq_len": longest, "trees": {0: [-1] * (tree - 1)} if tree else {}}
    )


def grid(world: World, requests: int, tokens: int, context: int) -> tuple[int, ...]:
    """That of long.cu's launch; empty if another kernel serves the step."""
    launch = short_launch(world, requests, tokens, context)
    return launch.grid if launch.spec.entry == "attend_long" else ()


@pytest.mark.parametrize("sizes", [WIDE, NARROW], ids=["70b", "8b"])
def test_products_are_of_tensor_core_groups_and_chains_spill_nothing(sizes):
    world = world_of({**sizes, "quantize_out": True}, tree=4)
    specs = long.long_specs(world.call([(0, 0, 1)]), world.limits())
    assert [spec.constants["TREE"] for spec in specs] == [False, True]
    for spec, binary, code in compile_all(specs):
        is_tree = spec.constants["TREE"]
        assert "HGMMA" in code and bool(re.search(r"\bHMMA", code)) == is_tree
        assert binary.local_bytes <= 80 * is_tree, "a few numbers of warps that have ended"
        assert "ACQBULK" in code and "PREEXIT" in code, "launches are ordered"
        assert binary.shared_bytes <= 227 * 1024


def test_contexts_that_are_long_are_shared_by_all_multiprocessors():
    world = world_of(WIDE)
    assert grid(world, 1, 11, batch.LONG) == ()
    assert grid(world, 1, 11, 24_576) == (16, 8, 1)
    assert grid(world, 1, 11, 32_768) == (), "long_batch.cu is faster"
    assert grid(world, 1, 11, 8_192) == (), "generation.cu is as fast"
    assert grid(world, 1, 8, 8_192) == (16, 8, 1)
    assert grid(world, 1, 2, 32_768) == (), "16 rows are batch.cu's"
    assert grid(world, 1, 17, 32_768) == (8, 16, 1), "two blocks of up to 128 rows"
    assert grid(world, 2, 11, 8_192) == (8, 8, 2)
    assert grid(world, 8, 11, 32_768) == (), "their work items have no room"
    assert grid(world, 16, 11, 8_192) == (), "a multiprocessor for each context"
    assert grid(world_of(NARROW), 1, 17, 24_576) == (16, 8, 1)


@pytest.mark.parametrize(
    "sizes", [{"kv_dtype": "bfloat16"}, {"size": 64}, {"window": 100}], ids=str
)
def test_what_it_does_not_cover_goes_to_other_kernels(sizes):
    if sizes.get("kv_dtype") == "bfloat16":
        sizes = {"kv_dtype": World.kv_dtype}
    world = world_of({**WIDE, **sizes})
    assert grid(world, 1, 11, 32_768) == ()
    assert not long.long_specs(world.call([(0, 0, 1)]), world.limits())


def test_warpgroups_share_the_tiles_of_many_rows_and_the_work_items_of_few():
    for sizes, tokens, streams in ((WIDE, 8, 2), (WIDE, 9, 1), (NARROW, 16, 2), (NARROW, 17, 1)):
        launch = short_launch(world_of(sizes), 1, tokens, 24_576)
        block_tokens, most, found, units = launch.arguments[14:18]
        assert (block_tokens, most, found) == (tokens, 17, streams)
        assert units == count_units(24_576)


def test_trees_are_as_long_as_the_window_of_keys_behind_their_roots():
    for sizes, tokens, found in (
        (WIDE, 32, (8, 16, 1)),
        (NARROW, long.MAX_TREE, (3, 40, 1)),
        (NARROW, long.MAX_TREE + 1, ()),
    ):
        world = world_of(sizes, tree=tokens)
        shape = StepShape(tokens, 1, tokens, tokens, 32_768, tokens)
        step = world.step([(0, 0, min(tokens, 64))])
        env = changed(world.env(step), use_pdl=True)
        (launch,) = kernel.launches(world.call([(0, 0, 1)]), env, shape)
        is_long = launch.spec.entry == "attend_long" and launch.spec.constants["TREE"]
        assert (launch.grid if is_long else ()) == found


def test_small_engines_have_no_binary_of_it():
    world = world_of(WIDE, longest=batch.LONG)
    assert not long.long_specs(world.call([(0, 0, 1)]), world.limits())
