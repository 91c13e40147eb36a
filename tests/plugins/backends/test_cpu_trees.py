"""Trees of tokens on the CPU: the bits of plain decoding, and paths that lead elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention import World, same_bits
from support.trees import SHAPES, WORLDS, along, differing_tokens, random_parents, world_of

from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.core.calls import Trees
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.spec import SPEC
from llmctl.runtime.step import find_paths

pytestmark = pytest.mark.usefixtures("kernels")


class CpuWorld(World):
    """Runs its parts with the compiled CPU kernels."""

    def run(self, parts, execute=None, padding=(0, 0), **bounds):
        call = self.call(parts)
        CpuProgram([call]).run(self.step(parts), self.cache)
        return list(call.outputs["out"].split([count for *_, count in parts]))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", [*SHAPES, "random"])
def test_tokens_get_the_bits_of_decoding_their_paths(world, shape):
    """With tiles' borders (32 keys) in front of, inside and behind the tree."""
    parents = SHAPES.get(shape) or random_parents(40, 5)
    for root in (30, 63, 300):
        made = world_of(world, parents, CpuWorld)
        assert not differing_tokens(made, root, None)
        part = [(0, root, len(parents) + 1)]
        (found,), step, call = made.run(part), made.step(part), made.call(part)
        reference(call.inputs, call.outputs, call.attributes, step, made.cache)
        rounding = SPEC.tolerance[str(found.dtype).removeprefix("torch.")]
        torch.testing.assert_close(
            found.float(), call.outputs["out"].float(), rtol=rounding.rtol, atol=rounding.atol
        )


def test_trees_share_a_step_with_chains_and_prompts():
    for name in WORLDS:
        made = world_of(name, random_parents(9, 3), CpuWorld)
        assert not differing_tokens(made, 122, None, beside=True)


def outside(step):
    step.trees.paths[12, 1] = 5000


def negative(step):
    step.trees.paths[12, 1] = -1


def another_root(step):
    step.trees.paths[12, 0] = 3


def another_depth(step):
    step.position_ids[12] += 1


def another_position(step):
    step.position_ids[5] = 57 + 12


def behind_the_paths(step):
    step.trees.start[0] = 1


CHANGES = (outside, negative, another_root, another_depth, another_position, behind_the_paths)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_paths_that_lead_elsewhere_are_refused_before_a_kernel_runs(change):
    world = world_of("64, FP8", SHAPES["binary"], CpuWorld)
    part = [(0, 57, 13)]
    step, call = world.step(part), world.call(part)
    change(step)
    with pytest.raises(AssertionError, match="tree"):
        CpuProgram([call]).run(step, world.cache)
    assert (call.outputs["out"].view(torch.uint8) == 0x55).all()


def level_by_level(parents, root, seed):
    """(places of a tree's tokens behind its root, drawn; the steps that compute it: for each depth
    its tokens and the `Trees` of their paths)."""
    paths, depths = find_paths(parents)
    places = np.random.default_rng(seed).permutation(len(parents)) + 1
    where = np.array([0, *places], np.int32)
    steps = []
    for depth in range(1, int(depths.max()) + 1):
        tokens = np.flatnonzero(depths == depth)
        own = where[paths[tokens, : depth + 1]]
        trees = Trees(np.zeros(1, np.int32), np.ascontiguousarray(own), np.array([root], np.int32))
        steps.append((tokens, trees))
    return where, steps


def continued(world, root, where, tokens, trees):
    """The step of some tokens of request 0's tree, whose keys lie at their places."""
    depth = trees.paths.shape[1] - 1
    whole = world.step([(0, root, len(where))])
    return replace(
        whole,
        token_ids=np.zeros(len(tokens), np.int32),
        position_ids=np.full(len(tokens), root + depth, np.int32),
        cu_q=np.array([0, len(tokens)], np.int32),
        slot_mapping=np.zeros(len(tokens), np.int32),
        trees=trees,
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", [*SHAPES, "random"])
def test_a_tree_that_is_computed_level_by_level_has_the_same_bits(world, shape):
    """As a head computes one that it drafts: its tokens lie anywhere behind the root."""
    parents = SHAPES.get(shape) or random_parents(40, 5)
    for root in (30, 63, 300):
        made = world_of(world, parents, CpuWorld)
        (wanted,) = made.run([(0, root, len(parents) + 1)])
        where, steps = level_by_level(parents, root, root)
        moved = along(made, root, np.argsort(where).tolist())  # keys at the tokens' places
        moved.queries[0] = made.queries[0]
        for tokens, trees in steps:
            step = continued(made, root, where, tokens, trees)
            call = made.call([(0, root + int(token), 1) for token in tokens])
            CpuProgram([call]).run(step, moved.cache)
            found = call.outputs["out"]
            assert same_bits(found, wanted[torch.from_numpy(tokens)])
            reference(call.inputs, call.outputs, call.attributes, step, moved.cache)
            rounding = SPEC.tolerance[str(found.dtype).removeprefix("torch.")]
            torch.testing.assert_close(
                wanted[torch.from_numpy(tokens)].float(), call.outputs["out"].float(),
                rtol=rounding.rtol, atol=rounding.atol,
            )  # fmt: skip


def behind_the_entries(step):
    step.trees.paths[1, 1] = step.kv_len[0] - step.trees.roots[0]


def a_root_on_the_way(step):
    step.trees.paths[1, 1] = 0


def a_root_behind_the_entries(step):
    step.trees.roots[0] = step.kv_len[0] + 1


def a_negative_root(step):
    step.trees.roots[0] = -1


def deeper_than_its_path(step):
    step.position_ids[1] += 1


def as_deep_as_the_root(step):
    step.position_ids[1] = step.trees.roots[0]


def before_the_root(step):
    step.trees.paths[1, 2] = -1


STORED = (
    before_the_root,
    behind_the_entries,
    a_root_on_the_way,
    a_root_behind_the_entries,
    a_negative_root,
    deeper_than_its_path,
    as_deep_as_the_root,
)


@pytest.mark.parametrize("change", STORED, ids=lambda change: change.__name__)
def test_paths_over_stored_tokens_that_lead_elsewhere_are_refused(change):
    parents = SHAPES["binary"]
    world = world_of("64, FP8", parents, CpuWorld)
    where, steps = level_by_level(parents, 57, 1)
    tokens, trees = steps[1]
    step = continued(world, 57, where, tokens, trees)
    call = world.call([(0, 57 + int(token), 1) for token in tokens])
    change(step)
    with pytest.raises(AssertionError, match="tree"):
        CpuProgram([call]).run(step, world.cache)
    assert (call.outputs["out"].view(torch.uint8) == 0x55).all()
