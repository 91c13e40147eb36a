"""The attention kernel of verifications and of few requests: what it compiles to, and which steps
it serves. tests/gpu compares its bits."""

from __future__ import annotations

import re

import pytest
import torch
from support.attention import FP8, NOT_BY_WARP, World, changed, short_launch
from support.attention_compiled import check_verification, largest, of_verification
from support.attention_models import OF_SIZE
from support.kernel import compile_all

from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.shared.tiles import count_units
from llmctl.plugins.ops.paged_attention.tree.tree import count_parts, tree_spec
from llmctl.plugins.ops.paged_attention.verification import verification

WIDE = {
    "heads": 64,
    "kv_heads": 8,
    "size": 128,
    "lengths": (64,),
    "kv_dtype": FP8,
    "max_seq_len": verification.MAX_CONTEXT,
}
NARROW = {**WIDE, "heads": 32}


def variant(world: World, requests: int, tokens: int, max_kv_len: int = 1024) -> str:
    """The variant of a launch; empty if another kernel serves the step."""
    launch = short_launch(world, requests, tokens, max_kv_len)
    return launch.spec.name.split(".")[-1] if launch.spec.entry == "verification" else ""


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kv", ["fp8", "int8", "bfloat16"])
def test_blocks_hand_on_through_shared_memory_and_have_room(size, kv):
    """test_kernel.py looks at products, spills and launches. Of trees those with fewest rows are
    compiled here, and those with most in test_batch.py."""
    heads = OF_SIZE[size]
    specs = of_verification(heads, kv)
    of_trees = [spec for spec in specs if spec.constants["TREE"]]
    trees = [spec.name.split(".")[-2] for spec in of_trees]
    is_wide = kv == "bfloat16" and size == 128  # room for four units alone
    ways = [(4, 4)] if is_wide else [(2, 8), (4, 8)]
    assert trees == [f"k{k}u{units}r{rows}" for k, units in ways for rows in (8, 16, 24)]
    of_chains = [spec for spec in specs if spec not in of_trees]
    names = [spec.name.split(".")[-1] for spec in of_chains]
    if size == 64:  # not wide
        assert names == [f"k2u{units}r{rows}" for units in (8, 10, 12) for rows in (8, 16)]
    elif kv == "bfloat16":  # 16-bit tiles have room for four units alone
        assert names == ["k4u4r8", "k5u4r8", "k6u4r8"]
    else:
        of = ((4, 8), (5, 10), (6, 12))
        assert names == [n for k, u in of for n in (f"k{k}u4r8", f"k2u{u}r8", f"k2u{u}r16")]
    assert all(spec.shared_bytes <= 227 * 1024 for spec in specs)
    check_verification([*largest(of_chains), of_trees[0]])


def test_a_model_with_wide_heads_splits_a_context_four_ways_while_blocks_are_few():
    world = World(**WIDE)
    assert variant(world, 1, 1) == variant(world, 1, 3) == variant(world, 3, 1) == "k4u4r8"
    assert variant(world, 1, 4) == variant(world, 1, 8) == variant(world, 8, 1) == "k2u8r8"
    assert variant(world, 1, 9) == variant(world, 1, 16) == variant(world, 4, 4) == "k2u8r16"
    assert variant(world, 1, 17) == "", "the blocks would not run at once"
    assert variant(World(**NARROW), 1, 1) == "k2u8r8"


@pytest.mark.parametrize(
    ("tokens", "names"),
    [(1, "k4u4r8 k5u4r8 k6u4r8"), (2, "k4u4r8 k5u4r8 k6u4r8"), (3, "k4u4r8 k2u10r8 k2u12r8")]
    + [(4, "k2u8r8 k2u10r8 k2u12r8"), (11, "k2u8r16 k2u10r16 k2u12r16")],
)
def test_up_to_2048_tokens_all_units_are_taken_at_once(tokens, names):
    world = World(**WIDE)
    short, middle, long = names.split()
    found = [variant(world, 1, tokens, most) for most in (1024, 1088, 1536, 2048, 4096)]
    assert found == [short, middle, middle, long, short]
    for name, most in ((short, 1024), (middle, 1536), (long, 2048)):
        splits, units = map(int, re.findall(r"[ku](\d+)", name))
        assert splits * units == count_units(most)


def test_small_pages_leave_no_registers_for_the_most_rows():
    world = World(**{**WIDE, "tokens_per_block": 16})
    assert variant(world, 1, 4, 2048) == "k2u12r8" and variant(world, 1, 11, 2048) == "k2u8r16"


def test_small_heads_are_served_where_clusters_of_generation_find_no_room():
    world = World(**{**NARROW, "size": 64})
    assert variant(world, 1, 11) == ""
    assert variant(world, 3, 1) == variant(world, 4, 4) == "k2u8r8"


def test_long_contexts_and_many_requests_stay_with_the_other_kernels():
    world = World(**WIDE)
    assert variant(world, 1, 1, verification.MAX_CONTEXT) != ""
    assert short_launch(world, 1, 1, verification.MAX_CONTEXT + 1).spec.entry == "generation"
    assert short_launch(world, 64, 1, 1024).spec.entry == "batch"


def test_a_16_bit_cache_has_room_for_half_as_many_units():
    world = World(**{**WIDE, "kv_dtype": torch.bfloat16})
    assert variant(world, 1, 1) == "k4u4r8" and variant(world, 1, 1, 2048) == "k6u4r8"
    assert short_launch(world, 1, 8, 1024).spec.entry == "generation"


@pytest.mark.parametrize("sizes", [{}, {"heads": 24}, {"size": 64}, {"kv_heads": 4}], ids=str)
def test_blocks_run_at_once_and_cover_every_token(sizes):
    world = World(**{**WIDE, **sizes})
    call, limits = world.call([(0, 0, 1)]), world.limits()
    built = kernel.kernels(call, limits)
    group = world.heads // world.kv_heads
    for requests in (1, 2, 3, 8):
        for tokens in range(1, kernel.SHORT + 1):
            launch = short_launch(world, requests, tokens, 1024)
            assert launch.spec in built
            if launch.spec.entry != "verification":
                continue
            splits, groups, of_requests = launch.grid
            assert splits == launch.spec.cluster and of_requests == requests
            assert splits * groups * of_requests <= limits.num_sms
            block_tokens = launch.arguments[12]
            assert block_tokens * group <= launch.spec.constants["ROWS"]
            assert block_tokens * (groups // world.kv_heads) >= tokens


@pytest.mark.parametrize(
    ("requests", "tokens", "most", "name"),
    [(1, 2, 1024, "k2u8r8"), (1, 16, 1024, "k2u8r16"), (1, 21, 1500, "k2u8r24")]
    + [(1, 32, 1024, "k2u8r16"), (1, 64, 1024, "tree"), (4, 21, 1024, "tree")]
    + [(1, 21, 4096, "k2u8r24"), (1, 2, 5000, "long"), (1, 16, 5000, "long")]
    + [(1, 32, 1537, "k2u8r16"), (16, 16, 1024, "tree"), (1, 65, 1024, "tree")]
    + [(1, 120, 1024, "tree"), (1, 130, 1024, ""), (1, 32, 5000, "long"), (4, 21, 5000, "long")],
)
def test_trees_take_the_kernel_that_was_fastest(requests, tokens, most, name):
    """As measured (docs/performance/trees.md); no name is Triton's kernel."""
    world = World(**{**WIDE, "max_seq_len": 8192, "trees": {0: [-1] * (tokens - 1)}})
    assert tree_kernel(world, requests, tokens, most) == name


def test_16_bit_caches_have_no_kernel_of_few_thread_blocks_and_leave_many_waves_to_triton():
    for requests, tokens, name in ((1, 21, "k4u4r24"), (4, 21, "")):
        world = World(**{**WIDE, "kv_dtype": torch.bfloat16, "trees": {0: [-1] * (tokens - 1)}})
        assert tree_kernel(world, requests, tokens, 1024) == name


def tree_kernel(world: World, requests: int, tokens: int, max_kv_len: int) -> str:
    """The variant that serves a step of trees; "tree" is tree.cu, "long" long.cu, no name Triton's
    kernel."""
    shape = StepShape(requests * tokens, requests, requests * tokens, tokens, max_kv_len, tokens)
    step = world.step([(0, 64 - tokens, tokens)] if tokens <= 64 else [(0, 0, 64)])
    env = changed(world.env(step), use_pdl=True)
    call = world.call([(0, 0, 1)])
    (launch,) = kernel.launches(call, env, shape)
    if launch.spec.entry == "verification":
        return launch.spec.name.split(".")[-2]
    return {"tree": "tree", "attend_long": "long"}.get(launch.spec.entry, "")


def test_heads_that_are_no_part_of_eight_columns_leave_trees_to_the_other_kernel():
    for heads, expected in ((32, True), (8, True), (24, False), (128, False)):
        world = World(**{**WIDE, "heads": heads})
        found = verification.choose_tree_variant(
            world.call([(0, 0, 1)]), world.limits(), 1, 5, 1024, 5
        )
        assert (found is not None) == expected


@pytest.mark.parametrize("other", NOT_BY_WARP, ids=lambda other: ", ".join(other))
def test_what_it_does_not_cover_stays_with_the_other_kernels(other):
    world = World(**{**WIDE, **other})
    assert variant(world, 1, 1) == ""


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("heads", [64, 8])
def test_the_kernel_of_few_thread_blocks_finds_room(heads, parts):
    world = World(**{**WIDE, "heads": heads, "trees": {0: [-1] * 20}})
    call, limits = world.call([(0, 0, 1)]), world.limits()
    ((_, binary, code),) = compile_all([tree_spec(call, limits, parts)])
    assert "HGMMA" in code and "HMMA" in code and "USETMAXREG" in code
    assert binary.local_bytes <= 64 and binary.shared_bytes <= 227 * 1024
    assert tree_spec(call, limits, parts) in kernel.kernels(call, limits)


@pytest.mark.parametrize(
    ("requests", "tokens", "parts"), [(1, 120, 2), (1, 128, 2), (2, 120, 1), (1, 129, 1)]
)
def test_two_thread_blocks_have_the_same_rows_where_all_run_at_once(requests, tokens, parts):
    world = World(**{**WIDE, "heads": 32, "trees": {0: [-1] * 20}})
    assert count_parts(world.call([(0, 0, 1)]), world.limits(), requests, tokens) == parts
