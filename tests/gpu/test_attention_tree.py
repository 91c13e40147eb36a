"""Token trees on the GPU: what each token sees, and that a branch has the bits of a plain draft."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention import FP8, World, same_bits, weight_rounding
from support.gpu import execute

from llmctl.plugins.core.examples import Example
from llmctl.plugins.ops.paged_attention.reference import reference
from llmctl.plugins.ops.paged_attention.spec import SPEC

LENGTH, MOST = 1150, 64  # the context ends in a unit of two tiles; tokens of the largest tree

WORLDS = [
    {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "quantize_out": True},
    {"heads": 32, "kv_heads": 8, "size": 64, "kv_dtype": FP8},
    {"heads": 24, "kv_heads": 8, "size": 128},
    {"heads": 12, "kv_heads": 4, "size": 96, "dtype": torch.float16, "kv_dtype": torch.float16},
    {"heads": 8, "kv_heads": 8, "size": 80, "window": 300},
]


def tree(parents: list[int], device: str) -> torch.Tensor:
    """[1, MOST, MOST / 32]: bit j of row i where token i is j or follows it."""
    mask = torch.zeros((1, MOST, MOST // 32), dtype=torch.int64)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[0, token] = mask[0, parent]
        mask[0, token, token // 32] |= 1 << (token % 32)
    return torch.where(mask >= 1 << 31, mask - (1 << 32), mask).int().to(device)


def compare(world: World, tokens: int) -> torch.Tensor:
    """The tree's rows by the kernel, after comparing them with the reference."""
    part = [(0, LENGTH - tokens, tokens)]
    found = world.run(part, execute)[0]
    step, call = world.step(part), world.call(part)
    slack = weight_rounding(Example(call, step, world.cache))
    reference(call.inputs, call.outputs, call.attributes, step, world.cache)
    wanted = call.outputs["out"].float()
    rounding = SPEC.tolerance[str(found.dtype).removeprefix("torch.")]
    allowed = slack + rounding.atol + rounding.rtol * wanted.abs()
    excess = (found.float() - wanted).abs() - allowed
    assert excess.max() <= 0  # and NaN is not
    return found


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_tree_sees_its_branches_and_the_context(world):
    """Random trees of 2 to 64 tokens against the reference."""
    generator = torch.Generator().manual_seed(1)
    for tokens in (2, 6, 17, 33, MOST):
        drawn = torch.rand(tokens, generator=generator).tolist()
        parents = [-1, *(int(share * i) for i, share in enumerate(drawn[1:], 1))]
        made = World(**world, lengths=(LENGTH,), device="cuda", tree_mask=tree(parents, "cuda"))
        compare(made, tokens)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_branch_has_the_bits_of_a_plain_draft(world):
    plain = World(**world, lengths=(LENGTH,), device="cuda")
    #   tokens 1 to 4 follow each other; token 5 is another child of the root
    branched = replace(plain, tree_mask=tree([-1, 0, 1, 2, 3, 0], "cuda"), scratch={})
    found = compare(branched, 6)
    chain = plain.run([(0, LENGTH - 6, 6)], execute)[0]
    assert same_bits(found[:5], chain[:5])
    assert not same_bits(found[5], chain[5])
