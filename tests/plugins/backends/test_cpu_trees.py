"""Trees of tokens on the CPU: the bits of plain decoding, and paths that lead elsewhere."""

from __future__ import annotations

import pytest
import torch
from support.attention import World
from support.trees import SHAPES, WORLDS, differing_tokens, random_parents, world_of

from llmctl.plugins.backends.cpu import CpuProgram
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.spec import SPEC

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
