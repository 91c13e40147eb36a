"""Parts of static trees: parents first, siblings apart, no node without what leads to it."""

from __future__ import annotations

import random

from llmctl.builder.heads.medusa.tree import MedusaTree, parse_choices
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.static_nodes import first_nodes


def test_nodes_are_ordered_by_length_and_path():
    tree = parse_choices("[[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]")
    nodes = first_nodes(tree, 9)
    assert nodes.parents == [ROOT, ROOT, 0, 0, 1, 1, 2, 3, 6]
    assert nodes.heads == [0, 0, 1, 1, 1, 1, 2, 2, 3]
    assert nodes.ranks == [0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert not nodes.is_chain and first_nodes(tree, 4).is_chain


def test_any_number_of_first_nodes_is_a_tree():
    draw = random.Random(0)
    for _ in range(50):
        paths = [tuple(draw.randrange(4) for _ in range(draw.randint(1, 4))) for _ in range(30)]
        tree = MedusaTree.of(paths)
        assert set(paths) <= set(tree.paths)
        for count in range(tree.num_nodes + 1):
            nodes = first_nodes(tree, count)
            # Drafts checks that parents come first; siblings have different ranks of one head.
            Drafts([0] * count, nodes.parents)
            siblings = list(zip(nodes.parents, nodes.ranks, strict=True))
            assert len(set(siblings)) == count
            found = {()}
            made = []
            for parent, rank in siblings:
                made.append(((*made[parent], rank)) if parent != ROOT else (rank,))
                assert made[-1][:-1] in found
                found.add(made[-1])
            assert set(made) == set(tree.paths[:count])
            assert [len(path) - 1 for path in made] == nodes.heads
