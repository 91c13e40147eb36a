"""Trees of tokens on the GPU: the bits of decoding each path, and how long it takes."""

from __future__ import annotations

import pytest
import torch
from support.attention import FP8, INT8, World
from support.attention_reference import is_near_reference
from support.gpu import execute
from support.trees import SHAPES, differing_chosen, differing_tokens, random_parents

HALF = {"dtype": torch.float16, "kv_dtype": torch.float16}
WORLDS = {
    "70b": {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "quantize_out": True},
    "8b": {"heads": 32, "kv_heads": 8, "size": 128},
    "8b, FP8": {"heads": 32, "kv_heads": 8, "size": 128, "kv_dtype": FP8},
    "128, one query head": {"heads": 4, "kv_heads": 4, "size": 128, "kv_dtype": FP8},
    "8b, INT8": {"heads": 32, "kv_heads": 8, "size": 128, "kv_dtype": INT8},
    "1b": {"heads": 32, "kv_heads": 8, "size": 64, "kv_dtype": FP8},
    "96": {"heads": 12, "kv_heads": 4, "size": 96, **HALF, "tokens_per_block": 16},
    "80, window": {"heads": 8, "kv_heads": 8, "size": 80, "window": 300},
    "128, sinks": {"heads": 8, "kv_heads": 2, "size": 128, "kv_dtype": FP8, "window": 200,
                   "sinks": 70},
}  # fmt: skip


def world_of(name: str, parents: list[int], length: int) -> World:
    lengths = (length, 60, 90)
    return World(**WORLDS[name], lengths=lengths, device="cuda", trees={0: parents}, spread=2.0)


@pytest.mark.parametrize("name", WORLDS)
def test_tokens_get_the_bits_of_decoding_their_paths(name):
    """The other kernels decode the paths. Roots at the borders of tiles, of units of one, two and
    eight tiles, and around them; random trees of up to 64 tokens."""
    trees = [*SHAPES.values(), *(random_parents(n, n) for n in (16, 31, 63))]
    for index, parents in enumerate(trees):
        for root in (3, 57, 1023, 1024 + 60 * (index % 3), 4096 + 17 * index):
            world = world_of(name, parents, root + 70)
            assert not differing_tokens(world, root, execute), (parents, root)


@pytest.mark.parametrize("name", WORLDS)
def test_tokens_get_them_in_a_step_behind_those_that_stored_the_others(name):
    """As a head drafts a tree: levels of up to 20 tokens, of which the deepest have the most before
    them; in contexts of one, two and many tiles to a work item."""
    for count in (31, 63):
        parents = random_parents(count, count)
        for root in (3, 57, 1000, 1023, 1600, 5000):
            world, decoded = world_of(name, parents, root + 70), {}
            for chosen in (range(1, 11), range(count - 9, count + 1), range(2, count, 3)):
                assert not differing_chosen(world, root, list(chosen), execute, decoded)


@pytest.mark.parametrize("name", ["70b", "1b", "80, window"])
def test_trees_share_a_step_with_chains_and_prompts(name):
    for drafts in (5, 40):
        world = world_of(name, random_parents(drafts, 3), 1300)
        assert not differing_tokens(world, 1190, execute, beside=True)


@pytest.mark.parametrize("name", ["70b", "8b, FP8", "128, one query head", "1b"])
def test_trees_of_up_to_129_tokens(name):
    """In up to three tiles from the root's on, and paths of up to three, with work items of one and
    two tiles."""
    chains = [i - 1 if i % 60 else -1 for i in range(120)]
    window = [-1, 0, 1, *(-1 if i % 4 == 0 else 2 + i for i in range(116))]
    trees = [random_parents(119, 1), list(range(-1, 127)), chains, window]
    for index, parents in enumerate(trees):
        for root in (3, 63, 1000 + index, 1023, 1600 + 17 * index):
            world = world_of(name, parents, root + 140)
            assert not differing_tokens(world, root, execute), (parents, root)
    world = world_of(name, trees[0], 1300)
    assert not differing_tokens(world, 1100, execute, beside=True)


@pytest.mark.parametrize("name", ["70b", "8b, FP8"])
@pytest.mark.parametrize(
    ("root", "drafts"), [(4200, 7), (5400, 119), (8192 + 8 * 64 - 3, 20), (32_800, 31)]
)
def test_long_contexts(name, root, drafts):
    """Shared by many thread blocks, with one request in the step, or by few. The root is in the
    middle of a work item, at the end of one, and at the start."""
    world, decoded = world_of(name, random_parents(drafts, 8), root + 140), {}
    for padding in ((3, 2), (0, 0)):
        assert not differing_tokens(world, root, execute, decoded=decoded, padding=padding)


@pytest.mark.parametrize("name", WORLDS)
def test_kernels_compute_what_the_reference_does(name):
    for drafts in (1, 5, 16, 63):
        world = world_of(name, random_parents(drafts, drafts), 1200)
        part = [(0, 1100, drafts + 1)]
        (found,) = world.run(part, execute)
        assert is_near_reference(world, part, found)
