"""Trees of tokens: each token gets the bits of decoding its path token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.attention_compiled import TREES_HERE, check_trees
from support.attention_reference import is_near_reference
from support.trees import (
    SHAPES,
    WORLDS,
    Rows,
    differing_chosen,
    differing_tokens,
    random_parents,
    world_of,
)

from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.triton import generation as triton_generation
from llmctl.plugins.ops.paged_attention.triton.state import attend, sees, widen
from llmctl.plugins.ops.paged_attention.triton.tiles import keys_of, load_keys

# Heads and caches change how a key is read, not which: of these shapes one has most branches, and
# one a path behind places that it does not see.
SHAPES_EVERYWHERE = ("binary", "a path at the highest places")


def execute(launches) -> None:
    with np.errstate(all="ignore"):  # rows of no request may divide by zero
        run_launches(launches)


@pytest.fixture(scope="module")
def decoded() -> dict[str, Rows]:
    """What plain decoding of a path gives, by world: trees of different shapes share paths."""
    return {world: {} for world in WORLDS}


@pytest.mark.parametrize(
    ("world", "shape"),
    [("64, FP8", shape) for shape in SHAPES]
    + [(w, shape) for w in WORLDS if w != "64, FP8" for shape in SHAPES_EVERYWHERE],
)
def test_tokens_get_the_bits_of_decoding_their_paths(world, shape, decoded):
    """With tiles' borders (64 keys) in front of, inside and behind the tree; where units are two
    tiles they are covered on a GPU."""
    for root in (57, 63, 64):
        made, rows = world_of(world, SHAPES[shape]), decoded[world]
        assert not differing_tokens(made, root, execute, decoded=rows)


@pytest.mark.parametrize("world", WORLDS)
def test_tokens_get_them_in_a_step_behind_those_that_stored_the_others(world, decoded):
    made = world_of(world, SHAPES["binary"])
    for root, chosen in ((57, [3, 4, 5, 6]), (64, [12]), (63, [7, 8, 9, 10, 11, 12])):
        assert not differing_chosen(made, root, chosen, execute, decoded[world])


def test_trees_share_a_step_with_chains_and_prompts():
    for name in ("64, FP8", "96, float16, sinks"):
        assert not differing_tokens(world_of(name, random_parents(9, 3)), 122, execute, beside=True)


def test_a_mask_over_places_of_the_cache_would_not_do(monkeypatch):
    """It is what the bits above are worth: the same keys in other tiles give other bits."""

    @triton.jit
    def masked(
        queries, keys_base, table, tile, loaded, position, token, first_token, num_tokens, root,
        paths, path_stride, largest, total, acc, scale, limit, reach, sinks, HAS_WINDOW, HAS_SINKS,
        HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH, INNER,
    ):  # fmt: skip
        key = keys_of(tile)
        visible = sees(key, position, root, reach, sinks, HAS_WINDOW, HAS_SINKS)
        for depth in tl.range(0, 16):
            on_path = (position >= root + depth) & (position >= root)
            node = tl.load(paths + token * path_stride + depth, mask=on_path, other=-1)
            visible = visible | ((key - root)[None, :] == node[:, None]) & on_path[:, None]
        pages = tl.load(table + key // TOKENS_PER_BLOCK, mask=key < loaded, other=0)
        k, v = load_keys(keys_base, pages, key, key < loaded, HEADS, TOKENS_PER_BLOCK, SIZE, WIDTH)
        k, v = widen(k, INNER), widen(v, INNER)
        return attend(queries, k, v, visible, largest, total, acc, scale, True)

    world = world_of("64, FP8", SHAPES["a path at the highest places"])
    assert not differing_tokens(world, 57, execute)
    monkeypatch.setattr(triton_generation, "attend_paths", masked)
    part = [(0, 57, 10)]
    found, step, call = world.run(part, execute)[0], world.step(part), world.call(part)
    reference(call.inputs, call.outputs, call.attributes, step, world.cache)
    torch.testing.assert_close(found, call.outputs["out"], rtol=2**-6, atol=2**-6)
    assert differing_tokens(world, 57, execute)


@pytest.mark.parametrize("world", WORLDS)
def test_kernels_compute_what_the_reference_does(world):
    for seed, drafts in enumerate((1, 5, 23)):
        made = world_of(world, random_parents(drafts, seed))
        part = [(0, 60, drafts + 1)]
        (found,) = made.run(part, execute)
        assert is_near_reference(made, part, found)


@pytest.mark.parametrize("name", TREES_HERE)
def test_the_kernel_compiles_with_few_spills_and_two_fit_a_multiprocessor(name):
    """Of other heads and caches: tests/gpu/test_attention_compiled.py."""
    check_trees(name)
