"""The attention kernel of verifications in long contexts: what it compiles to, which steps it
serves, and how it divides a context. test_long_emulated.py and tests/gpu compare
its bits."""

from __future__ import annotations

import re

import pytest
from support.attention import FP8, World, changed, short_launch
from support.kernel import compile_all

from llmctl.plugins.backends.cuda.kernel_spec import StepShape
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention.batch import batch
from llmctl.plugins.ops.paged_attention.launch_arguments import partials
from llmctl.plugins.ops.paged_attention.long import long

WIDE = {"heads": 64, "kv_heads": 8, "size": 128, "lengths": (64, 64), "kv_dtype": FP8}
NARROW = {**WIDE, "heads": 32}
CONTEXT = 32_768


def world_of(sizes: dict[str, object], drafts: int = 16, longest: int = 40_000) -> World:
    """One whose engine verifies so many drafts and takes requests of up to `longest` tokens."""
    return World(**{**sizes, "max_seq_len": longest, "trees": {1: [-1] * drafts}})


def found_in(launch) -> tuple[int, ...]:
    """Rows of a thread block and the grid; empty if another kernel serves the step."""
    is_it = launch.spec.entry == "attend_long"
    return (64 * int(launch.spec.constants["WARPGROUPS"]), *launch.grid) if is_it else ()


def chain(world: World, requests: int, tokens: int, context: int = CONTEXT) -> tuple[int, ...]:
    return found_in(short_launch(world, requests, tokens, context))


def tree(world: World, requests: int, tokens: int, context: int = CONTEXT) -> tuple[int, ...]:
    shape = StepShape(requests * tokens, requests, 1, tokens, context, tokens)
    step = world.step([(1, 0, min(tokens, 64))])
    env = changed(world.env(step), use_pdl=True)
    (launch,) = kernel.launches(world.call([(0, 0, 1)]), env, shape)
    return found_in(launch)


@pytest.mark.parametrize("sizes", [WIDE, {**WIDE, "heads": 7, "kv_heads": 1}], ids=["70b", "7x1"])
def test_products_follow_each_other_while_weights_are_made(sizes):
    world = world_of({**sizes, "quantize_out": True})
    specs = long.long_specs(world.call([(0, 0, 1)]), world.limits())
    trees = [False] * 3 + [True, True] * (sizes["heads"] == 64)
    assert [spec.constants["TREE"] for spec in specs] == trees
    assert [spec.constants["ALONE"] for spec in specs] == [False, True, *[False] * (len(specs) - 2)]
    for spec, binary, code in compile_all(specs):
        # What is merged, kept in local memory while a work item is being processed. The binary for
        # many requests has places there between contexts, and an address where it stores a work
        # item, which ranges never do.
        alone = bool(spec.constants["ALONE"])
        most = (8 if sizes["heads"] == 64 else 152) if alone else 32
        assert binary.local_bytes <= most, spec.name
        products = [each.start() for each in re.finditer(r"\bHGMMA", code)]
        # Once more for thread blocks that help contexts with their beginnings.
        c = spec.constants
        helps = not alone and not c["TREE"] and c["WARPGROUPS"] == 2 and c["HEADS"] % 2 == 0
        copies = 1 + helps
        found = products[: len(products) // copies]
        inside = code[found[0] : found[-1]]
        if alone:
            assert len(re.findall(r"\b(?:LDL|STL)", inside)) <= 8, spec.name
        # Logits of the first tile and of the next, eight each; values of a tile and the last, four.
        # A tile in any slot, and in each of the two.
        tiles = 3
        assert len(found) == 12 + 12 * tiles
        # A compiler that cannot tell that registers are free waits after every product.
        assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == (2 + 2 * tiles) * copies
        # One that cannot tell that descriptors are the same in all lanes moves each of them.
        assert len(re.findall(r"\bR2UR", inside)) <= 12
        assert bool(re.search(r"\bHMMA", code)) == spec.constants["TREE"]
        assert "LDGSTS" in code and "F2FP.F16.E4M3" in code
        assert "ACQBULK" in code and "PREEXIT" in code, "launches are ordered"
        at_once = 2 if spec.constants["WARPGROUPS"] == 1 else 1
        assert at_once * (binary.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("sizes", "requests", "tokens", "context", "wanted"),
    [
        (NARROW, 1, 11, CONTEXT, (64, 33, 8, 1)),
        (NARROW, 8, 11, CONTEXT, (64, 33, 8, 1)),  # all share all contexts
        (NARROW, 64, 11, CONTEXT, (64, 264, 1, 1)),  # ranges of all tiles
        (NARROW, 1, 17, CONTEXT, (128, 132, 1, 1)),  # four help two of eight contexts each
        (WIDE, 1, 11, CONTEXT, (128, 132, 1, 1)),
        (WIDE, 1, 17, CONTEXT, (64, 11, 24, 1)),  # three blocks of up to 64 rows
        (WIDE, 1, 8, 8192, (64, 33, 8, 1)),
        (WIDE, 1, 11, 4097, (128, 16, 8, 1)),  # from where verification.cu ends
        (WIDE, 12, 16, CONTEXT, (128, 16, 8, 1)),
        (WIDE, 16, 16, CONTEXT, (128, 1, 8, 16)),
    ],
    ids=str,
)
def test_contexts_are_shared_by_all_multiprocessors(sizes, requests, tokens, context, wanted):
    assert chain(world_of(sizes), requests, tokens, context) == wanted


def test_contexts_that_nobody_shares_have_a_binary_of_their_own():
    for requests, is_alone in ((1, False), (16, False), (17, True), (64, True)):
        launch = short_launch(world_of(NARROW), requests, 11, CONTEXT)
        assert launch.spec.constants["ALONE"] == is_alone
        assert (launch.grid == (264, 1, 1)) == is_alone


@pytest.mark.parametrize(
    ("sizes", "requests", "wanted"),
    [
        (WIDE, 1, (128, 8, 16, 1)),
        (WIDE, 8, (128, 1, 16, 8)),
        (NARROW, 1, (128, 16, 8, 1)),
        (NARROW, 8, (128, 16, 8, 1)),
        (NARROW, 64, (128, 1, 8, 64)),
    ],
    ids=str,
)
def test_trees_are_shared_as_chains_are(sizes, requests, wanted):
    assert tree(world_of(sizes, drafts=31), requests, 32) == wanted


def test_rows_are_divided_where_contexts_cannot_be():
    """Work items of 8 trees of 32 of 8B in 131,072 tokens would be 600 MB. There is room for those
    of shorter ones."""
    assert tree(world_of(NARROW, drafts=31, longest=131_072), 8, 32, 131_072) == (64, 16, 16, 1)


def test_other_steps_are_those_of_other_kernels():
    world = world_of(WIDE)
    assert chain(world, 1, 11, batch.LONG) == ()
    assert chain(world, 1, 2) == (), "16 rows are batch.cu's"
    assert tree(world_of(WIDE, drafts=long.MAX_TREE - 1), 8, long.MAX_TREE)
    assert tree(world_of(WIDE, drafts=long.MAX_TREE), 8, long.MAX_TREE + 1) == ()


@pytest.mark.parametrize(
    "sizes",
    [{"kv_dtype": World.kv_dtype}, {"size": 64}, {"window": 100}],
    ids=str,
)
def test_what_it_does_not_cover_goes_to_other_kernels(sizes):
    world = world_of({**WIDE, **sizes})
    assert chain(world, 1, 11) == chain(world, 8, 11) == ()
    assert not long.long_specs(world.call([(0, 0, 1)]), world.limits())


def test_pages_have_the_keys_that_are_copied_at_once():
    assert chain(world_of({**WIDE, "tokens_per_block": 8}), 1, 11)
    world = world_of({**WIDE, "tokens_per_block": 4})
    assert chain(world, 1, 11) == tree(world, 1, 11) == ()


def test_engines_hold_the_binaries_that_their_steps_reach():
    def rows(sizes=WIDE, longest: int = 40_000, drafts: int = 16, requests: int = 8) -> list[int]:
        world = world_of(sizes, longest=longest)
        limits = changed(world.limits(), max_draft_len=drafts, max_batch_size=requests)
        specs = long.long_specs(world.call([(0, 0, 1)]), limits)
        return [64 * int(spec.constants["WARPGROUPS"]) for spec in specs]

    assert rows(longest=batch.LONG) == []
    assert rows(drafts=0) == [64, 64, 128]
    assert rows({**WIDE, "heads": 16}, drafts=0) == [64, 64], "34 rows"
    assert rows() == [64, 64, 128, 64, 128]
    assert rows(requests=1) == [64, 128, 64, 128], "which always share their contexts"


def test_more_entries_are_never_needed():
    """Of any shorter context: what the second and later of its shares hold, and one."""
    for splits in (2, 3, 16, 33):
        most = [long.most_entries(tiles, splits, True) for tiles in range(600)]
        assert most == sorted(most) and most[0] == 1
        assert most[512] <= 90, "work items of 32,768 tokens are 88"


def in_engine(sizes: dict[str, object], longest: int, **limits: int) -> tuple[float, tuple]:
    """Megabytes for partial results in such an engine, and what 11 tokens of a request launch."""
    world = world_of(sizes, longest=longest)
    parts = [(0, 53, 11)]
    step, call = world.step(parts), world.call(parts)
    env = changed(world.env(step), limits=changed(world.limits(), **limits), use_pdl=True)
    (launch,) = kernel.launches(call, env, world.shape(step, max_kv_len=longest))
    return partials(call, env)[0].numel() * 4 / 1e6, found_in(launch)


def test_an_engine_has_room_for_its_longest_chain_in_its_longest_context():
    """70B, 131,072 tokens. Where a request's work items have no room, as in an engine without
    drafts, its context is not shared here: another kernel serves it."""
    one = {"max_batch_size": 1}
    room, grid = in_engine(WIDE, 131_072, max_draft_len=10, **one)
    assert 102 < room < 103 and grid == (128, 132, 1, 1)
    room, grid = in_engine(WIDE, 131_072, max_draft_len=0, **one)
    assert 67 < room < 68 and grid == ()


def test_several_requests_have_room_in_engines_that_verify_drafts():
    """As many as share multiprocessors, and no more than 268 MB in any engine."""
    many = {"max_batch_size": 64, "max_draft_len": 10}
    assert 128 < in_engine(NARROW, 32_768, **many)[0] < 129
    assert 257 < in_engine(WIDE, 32_768, **many)[0] < 258
    assert 268 < in_engine(WIDE, 131_072, **many)[0] < 269
