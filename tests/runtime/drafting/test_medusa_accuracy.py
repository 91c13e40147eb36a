"""Trees from measured accuracies: counts against a recount, the best tree against all trees."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.fake_heads import FakeHeads, HeadedEngine
from support.fake_loop import Harness

from llmctl.builder.heads.medusa.tree import MedusaTree
from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy, best_tree
from llmctl.runtime.drafting.medusa.drafter import MedusaDrafter
from llmctl.runtime.request import Request

VOCAB = 23


def gain(shares, paths) -> float:
    return sum(np.prod([shares[head, rank] for head, rank in enumerate(path)]) for path in paths)


@pytest.mark.parametrize("seed", range(8))
def test_no_tree_of_that_size_promises_more(seed):
    shares = np.random.default_rng(seed).dirichlet(np.ones(4), size=3)[:, :3]
    paths = [p for depth in (1, 2, 3) for p in product(range(3), repeat=depth)]
    for size in (1, 2, 3, 4):
        tree, expected = best_tree(shares, size)
        assert tree.num_nodes == size and MedusaTree.of(tree.paths) == tree, "parents first"
        assert expected == pytest.approx(1 + gain(shares, tree.paths))
        best = 0.0
        closed = [()]
        for _ in range(size):  # all trees, a node at a time
            closed = {
                tuple(sorted({*known, path}))
                for known in closed
                for path in paths
                if path not in known and (len(path) == 1 or path[:-1] in known)
            }
        best = max(gain(shares, known) for known in closed)
        assert gain(shares, tree.paths) == pytest.approx(best)


def test_what_never_comes_is_not_drafted():
    shares = np.array([[0.5, 0.0], [0.0, 0.25]])
    tree, expected = best_tree(shares, 10)
    assert tree.paths == ((0,), (0, 1)) and expected == pytest.approx(1.625)


def test_counts_are_those_of_the_text():
    """Heads that are right at rank 1, of head 2 never; the drafter's tree has nothing to do with
    what is counted."""
    accuracy = HeadAccuracy()
    engine = HeadedEngine(vocab_size=VOCAB, max_draft_len=63)
    heads = FakeHeads(engine, 3, right_rank=1)
    drafter = MedusaDrafter(heads, MedusaTree.of([(0,)]), 1, accuracy, num_ranks=4)
    harness = Harness(engine, drafter)
    for start in range(5):
        harness.add(Request(tuple(range(start, start + 6)), max_tokens=30))
    harness.run()
    # 28 rounds of each have room; of the last three nobody asks after all their tokens came.
    assert accuracy.num_rounds == 5 * 25
    assert accuracy.shares.shape == (3, 4)
    assert (accuracy.shares[:, 1] == 1).all() and accuracy.shares.sum() == 3
    tree, expected = best_tree(accuracy.shares, 3)
    assert tree.paths == ((1,), (1, 1), (1, 1, 1)) and expected == 4
