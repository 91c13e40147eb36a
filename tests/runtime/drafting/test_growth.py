"""Trees from an EAGLE head: against a search over all that it offers, and against EAGLE's own
procedure, which prunes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from llmctl.builder.engine_format import MedusaTree, parse_choices
from llmctl.runtime.drafting.drafts import ROOT
from llmctl.runtime.drafting.growth.growth import (
    LEVELS,
    DynamicShape,
    DynamicTree,
    StaticTree,
)
from llmctl.runtime.drafting.static_nodes import first_nodes


class Model:
    """Log-probabilities that follow from the path; ties and impossible tokens are common."""

    def __init__(self, seed, vocab, flat=False, evenness=0.4):
        self.seed, self.vocab, self.flat, self.evenness = seed, vocab, flat, evenness

    def log_probs(self, path):
        draw = np.random.default_rng([self.seed, len(path), *path])
        if self.flat:
            values = draw.choice([0.0, -0.5, -1.0, -np.inf], self.vocab)
        else:
            values = np.log(draw.dirichlet(np.full(self.vocab, self.evenness)) + 1e-9)
        return values.astype(np.float32)

    def offers(self, path, count):
        values = self.log_probs(path)
        order = np.lexsort((np.arange(self.vocab), -values))[:count]
        return order.tolist(), values[order].tolist()


def sequence(end_id=None):
    return SimpleNamespace(request=SimpleNamespace(end_id=end_id))


def grow(tree, model, limit=None):
    """The tree's paths, and how many nodes of each level were expanded; places are checked."""
    sizes = []
    rows = [()]
    while True:
        offers = [model.offers(path, tree.num_offers) for path in rows]
        tree.take([ids for ids, _ in offers], [scores for _, scores in offers])
        if not tree.frontier:
            break
        lines = [node.line() for node in tree.frontier]
        held = {}
        for line in lines:
            for node in line:
                assert held.setdefault(node.place, node) is node, "a place of two nodes"
                assert limit is None or 1 <= node.place < limit
        rows = [tuple(node.token for node in line) for line in lines]
        sizes.append(len(rows))
    drafts = tree.drafts()
    return [tuple(drafts.tokens_to(i)) for i in range(len(drafts.tokens))], sizes


def by_eagle(model, room, count, width, end_id):
    """EAGLE's pool: the best `width` of a level are expanded, whatever else there is; then the best
    `room` of all, parents first where scores are equal."""
    pool, level = [], [((), 0.0)]
    for _ in range(LEVELS):
        fresh = []
        for path, score in level:
            for token, value in zip(*model.offers(path, count), strict=True):
                if value > -np.inf:
                    fresh.append(((*path, token), score + value))
        fresh = [(path, score, len(pool) + place) for place, (path, score) in enumerate(fresh)]
        pool += fresh
        best = sorted(fresh, key=lambda entry: (-entry[1], entry[2]))
        level = [(path, score) for path, score, _ in best if path[-1] != end_id][:width]
    return {path for path, *_ in sorted(pool, key=lambda entry: (-entry[1], entry[2]))[:room]}


@pytest.mark.parametrize("flat", [False, True], ids=["spread", "ties"])
@pytest.mark.parametrize("room", [1, 2, 5, 12, 40])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 1), (2, 2), (4, 3), (10, 10)])
def test_it_is_the_tree_that_eagle_would_draft(room, count, width, flat):
    for seed in range(6):
        end_id = 3 if seed % 2 else None
        model = Model(seed, 11, flat)
        tree = DynamicTree(sequence(end_id), 0, room, DynamicShape(count, width))
        paths, sizes = grow(tree, model, room)
        wanted = by_eagle(model, room, count, width, end_id)
        if flat:  # several trees are as good
            score = {path: sum(model.log_probs(path[:i])[t] for i, t in enumerate(path))
                     for path in wanted | set(paths)}  # fmt: skip
            assert sorted(map(score.get, paths)) == sorted(map(score.get, wanted))
        else:
            assert set(paths) == wanted
        assert len(set(paths)) == len(paths) <= room
        assert all(size <= width for size in sizes) and len(sizes) < LEVELS


@pytest.mark.parametrize("room", [3, 9, 25])
def test_with_room_to_look_everywhere_it_has_the_likeliest_paths_of_all(room):
    """Every path of up to five tokens of a vocabulary of four, sorted."""
    model = Model(7, 4, evenness=2.0)
    scores = {(): 0.0}
    for depth in range(5):
        for path in [path for path in scores if len(path) == depth]:
            for token, value in enumerate(model.log_probs(path)):
                scores[(*path, token)] = scores[path] + float(value)
    del scores[()]
    best = sorted(scores, key=lambda path: -scores[path])[:room]
    assert max(map(len, best)) < 5, "deeper paths could be better"
    paths, _ = grow(DynamicTree(sequence(), 0, room, DynamicShape(4, 64)), model, room)
    assert set(paths) == set(best)


def test_no_row_is_computed_whose_offers_could_not_be_drafted():
    """A certain path: the rows of a chain, and none for what is less likely or comes too late."""

    class Certain:
        def offers(self, path, count):
            return [len(path), 9], [0.0, -5.0]

    for room in (1, 2, 5, 30):
        tree = DynamicTree(sequence(), 0, room, DynamicShape(2, 1))
        paths, sizes = grow(tree, Certain(), room)
        longest = min(room, LEVELS)
        assert tuple(range(longest)) in paths
        assert sizes == [1] * (longest - 1)


def test_rounding_above_zero_makes_no_child_better_than_its_parent():
    class Rounded:
        def offers(self, path, count):
            return [1, 2], [1e-6, -0.1]

    tree = DynamicTree(sequence(), 0, 3, DynamicShape(2, 2))
    paths, _ = grow(tree, Rounded(), 3)
    assert (1,) in paths and (1, 1) in paths


def test_a_chain_is_drafted_as_one():
    model = Model(1, 5)
    tree = DynamicTree(sequence(), 0, 4, DynamicShape(1, 1))
    grow(tree, model, 4)
    assert tree.drafts().parents is None and len(tree.drafts().tokens) == 4


CHOICES = parse_choices("[[0],[1],[0,0],[0,2],[1,0],[0,2,0],[0,2,1],[1,0,0,0]]")


@pytest.mark.parametrize("count", range(1, 12))
def test_a_static_tree_has_the_offers_of_its_ranks(count):
    model = Model(5, 20)
    nodes = first_nodes(CHOICES, count)
    paths, sizes = grow(StaticTree(sequence(), 0, nodes), model)
    wanted = set()
    for ranks in CHOICES.paths[:count]:
        path = ()
        for rank in ranks:
            path = (*path, model.offers(path, 10)[0][rank])
        wanted.add(path)
    assert set(paths) == wanted and len(paths) == min(count, CHOICES.num_nodes)
    parents = {nodes.parents[i] for i in range(len(nodes.parents))} - {ROOT}
    assert sum(sizes) == len(parents), "leaves are not expanded"


def test_a_static_tree_leaves_out_what_is_not_offered():
    class Few:
        def offers(self, path, count):
            return [4, 7], [-0.1, -np.inf]

    nodes = first_nodes(CHOICES, CHOICES.num_nodes)
    paths, _ = grow(StaticTree(sequence(), 0, nodes), Few())
    assert set(paths) == {(4,), (4, 4)}
    paths, _ = grow(StaticTree(sequence(end_id=4), 0, nodes), Few())
    assert set(paths) == {(4,)}, "nothing follows an end id"


def test_a_published_tree_needs_few_rows():
    tree = parse_choices("mc_sim_7b_63")
    assert isinstance(tree, MedusaTree)
    _, sizes = grow(StaticTree(sequence(), 0, first_nodes(tree, 63)), Model(2, 40))
    assert len(sizes) == tree.depth - 1
