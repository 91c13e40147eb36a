"""verification.cu thread by thread on a CPU (support/emulated_warps.py): chains and trees have the
bits of decoding each token alone, by its binaries for few rows and for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support import emulated_warps
from support.attention import FP8, World, same_bits
from support.attention_reference import is_near_reference
from support.trees import differing_chosen, differing_tokens, random_parents

from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.paged_attention import ways
from llmctl.plugins.ops.paged_attention.tree import tree
from llmctl.plugins.ops.paged_attention.verification.verification import Variant


class Compiled(World):
    """Whose steps take the kernels of a GPU."""

    def env(self, step: StepInputs, padding: int = 0) -> LaunchEnv:
        return replace(super().env(step, padding), use_pdl=True)


WORLDS = {
    "70b, FP8": {"heads": 8, "kv_heads": 1, "size": 128, "kv_dtype": FP8, "quantize_out": True},
    "70b": {"heads": 8, "kv_heads": 1, "size": 128},
    "1b, FP8": {"heads": 4, "kv_heads": 1, "size": 64, "kv_dtype": FP8},
}


def world_of(name: str, length: int, parents: Sequence[int] = ()) -> Compiled:
    return Compiled(
        **WORLDS[name], lengths=(length, 60, 90), spread=2.0, trees={0: parents} if parents else {}
    )


class Runs:
    """Executes launches in ever other orders of threads, with copies done early and late."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.count = 0

    def __call__(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            assert launch.spec.entry == "verification", launch.spec.name
            self.names.add(launch.spec.name)
            self.count += 1
            emulated_warps.run([launch], self.count, is_late=self.count % 2 == 0)


def force(monkeypatch: pytest.MonkeyPatch, alone: Variant, many: Variant) -> None:
    """Have single tokens run by one binary, and chains and trees by another."""

    def choose(call: object, limits: object, requests: int, tokens: int, most: int) -> Variant:
        return alone if tokens == 1 else many

    monkeypatch.setattr(ways, "choose_cut", lambda *step: None)
    monkeypatch.setattr(ways, "choose_variant", choose)
    monkeypatch.setattr(tree, "choose_tree_variant", lambda *step: (many, 0.1))
    monkeypatch.setattr(tree, "estimate_us", lambda *step: None)


@pytest.mark.parametrize(
    ("name", "rows", "root"),
    [("70b, FP8", 8, 63), ("70b, FP8", 16, 1017), ("70b, FP8", 24, 57), ("70b, FP8", 24, 1023)]
    + [("70b, FP8", 24, 1166), ("70b", 24, 1020), ("1b, FP8", 16, 190)],
)
def test_trees_have_the_bits_of_decoding_their_paths(monkeypatch, name, rows, root):
    """In contexts of one, sixteen and more work items, of one tile and two; roots at the borders of
    tiles and of work items. All together, and some behind those that earlier steps stored."""
    units = 4 if name == "70b" else 8
    many = Variant(16 // units, units, rows, has_trees=True)
    force(monkeypatch, Variant(4, 4, 8), many)
    execute, world, decoded = Runs(), world_of(name, root + 20, random_parents(6, rows)), {}
    assert not differing_tokens(world, root, execute, decoded=decoded, padding=(0, 0))
    assert not differing_chosen(world, root, [2, 4, 5], execute, decoded)
    assert any(each.endswith(str(many)) for each in execute.names)


def test_they_are_what_the_reference_computes(monkeypatch):
    force(monkeypatch, Variant(4, 4, 8), Variant(2, 8, 24, has_trees=True))
    world, part = world_of("70b, FP8", 220, random_parents(12, 1)), [(0, 190, 13)]
    (found,) = world.run(part, Runs())
    assert is_near_reference(world, part, found)


@pytest.mark.parametrize(
    ("root", "alone", "many"),
    [(60, Variant(4, 4, 8), Variant(2, 8, 16)), (1030, Variant(5, 4, 8), Variant(2, 10, 16))]
    + [(640, Variant(4, 4, 8), Variant(2, 8, 16)), (1085, Variant(4, 4, 8), Variant(2, 10, 16))]
    + [(1210, Variant(4, 4, 8), Variant(2, 10, 16)), (1030, Variant(4, 4, 8), Variant(2, 8, 8))]
    + [(1500, Variant(2, 8, 8), Variant(2, 12, 16))],
    ids=str,
)
def test_chains_have_the_bits_of_decoding(monkeypatch, root, alone, many):
    """Of two thread blocks the first has fewer work items than the second, where these have a tile
    each: 4 and 7, 7 and 10. A second tile of a work item is copied at once where there are ten or
    twelve a thread block."""
    force(monkeypatch, alone, many)
    world, execute = world_of("70b, FP8", root + 11), Runs()
    (found,) = world.run([(0, root, 11)], execute)
    for token in (0, 4, 10):
        (own,) = world.run([(0, root + token, 1)], execute)
        assert same_bits(found[token : token + 1], own)
    assert {each.split(".")[-1] for each in execute.names} == {str(alone), str(many)}


def test_a_wrong_path_and_a_missing_wait_show(monkeypatch):
    """What the tests above are worth."""
    force(monkeypatch, Variant(4, 4, 8), Variant(2, 8, 8, has_trees=True))
    parents = [-1, 0, 0, 1]
    world, part = world_of("70b, FP8", 100, parents), [(0, 70, 5)]
    (wanted,) = world.run(part, Runs())
    (other,) = replace(world, trees={0: [-1, 0, 1, 1]}).run(part, Runs())
    assert same_bits(wanted[:3], other[:3]) and not same_bits(wanted[3:], other[3:])
    monkeypatch.setitem(emulated_warps._PTX, "cp.async.wait_group", "(void)0")
    monkeypatch.setattr(emulated_warps, "_libraries", {})

    def execute(launches: Sequence[Launch]) -> None:
        emulated_warps.run(launches, is_late=True)

    (early,) = world.run(part, execute)
    assert not torch.equal(early.view(torch.uint8), wanted.view(torch.uint8))
