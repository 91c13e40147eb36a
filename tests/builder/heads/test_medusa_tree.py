"""Trees of --medusa-choices: the published one by its counted facts, other forms, refusals."""

from __future__ import annotations

from collections import Counter

import pytest

from llmctl.builder.heads.medusa.published import PUBLISHED as TREES
from llmctl.builder.heads.medusa.tree import DEFAULT, MedusaTree, parse_choices
from llmctl.errors import BadConfig

PUBLISHED = """[
    [0],[0,0],[1],[0,1],[2],[0,0,0],[1,0],[0,2],[3],[0,3],[4],[0,4],[2,0],[0,5],[0,0,1],[5],
    [0,6],[6],[0,7],[0,1,0],[1,1],[7],[0,8],[0,0,2],[3,0],[0,9],[8],[9],[1,0,0],[0,2,0],
    [1,2],[0,0,3],[4,0],[2,1],[0,0,4],[0,0,5],[0,0,0,0],[0,1,1],[0,0,6],[0,3,0],[5,0],[1,3],
    [0,0,7],[0,0,8],[0,0,9],[6,0],[0,4,0],[1,4],[7,0],[0,1,2],[2,0,0],[3,1],[2,2],[8,0],
    [0,5,0],[1,5],[1,0,1],[0,2,1],[9,0],[0,6,0],[0,0,0,1],[1,6],[0,7,0]
]"""


def test_the_published_tree_has_the_counted_nodes():
    tree = parse_choices("mc_sim_7b_63")
    assert tree == parse_choices(PUBLISHED) == MedusaTree(DEFAULT)
    assert (tree.num_nodes, tree.depth) == (63, 4)
    assert Counter(map(len, tree.paths)) == {1: 10, 2: 28, 3: 23, 4: 2}
    assert len(set(tree.paths) - {path[:-1] for path in tree.paths}) == 42  # leaves


def test_every_published_tree_is_whole_and_in_order():
    """Nine trees of 63 nodes as their repository has them; 33b_stage1 goes no deeper than 3."""
    assert len(TREES) == 9
    for name, paths in TREES.items():
        tree = parse_choices(name)
        assert tree.paths == paths, "every parent is there, before its children"
        assert (tree.num_nodes, tree.depth) == (63, 3 if name == "vicuna_33b_stage1" else 4)
        assert set(Counter(rank for path in paths for rank in path)) == set(range(10))
    # from the quotation of this tree in lmdeploy/pytorch/models/medusa.py
    begins = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 2), (0, 0, 1), (0, 3)]
    ends = [(0, 5, 0), (3, 1), (0, 0, 2, 0), (7, 0), (1, 4)]
    assert list(TREES["vicuna_7b_stage2"])[:10] == begins
    assert list(TREES["vicuna_7b_stage2"])[-5:] == ends


def test_a_path_brings_what_leads_to_it():
    """TensorRT-LLM's own example, which its help counts as 9 tokens."""
    tree = parse_choices("[[0, 0, 0, 0], [0, 1, 0], [1, 0], [1, 1]]")
    assert tree.num_nodes == 9 and tree.depth == 4
    order = [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 1), (0, 1, 0), (1,), (1, 0), (1, 1)]
    assert list(tree.paths) == order, "what leads to a path comes right before it"


def test_a_tree_is_cut_to_the_heads_there_are():
    tree = MedusaTree(DEFAULT).of_depth(2)
    assert (tree.num_nodes, tree.depth) == (38, 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mc_sim", "it must be a list of paths, .* or one of mc_sim_7b_63"),
        ("[]", "it must be a list of paths"),
        ("[[0], [0, 1]", "it must be a list of paths"),
        ("[" * 5000, "it must be a list of paths"),
        ("__import__('os')", "it must be a list of paths"),
        ("{'a': 1}", "it must be a list of paths"),
        ("[0, 1]", "holds 0; it must be a list of paths"),
        ("[[0], []]", "holds \\[\\]; it must be a list of paths"),
        ("[[0, 10]]", "the path \\[0, 10\\]; every element is the rank of one of a head's 10"),
        ("[[-1]]", "the path \\[-1\\]"),
        ("[[True]]", "the path \\[True\\]"),
        ("[['0']]", "the path \\['0'\\]"),
        ("[[0], [1], [0]]", "the path \\[0\\] twice"),
    ],
)
def test_other_choices_are_refused_by_name(text: str, found: str):
    with pytest.raises(BadConfig, match=found) as error:
        parse_choices(text)
    assert str(error.value).startswith("--medusa-choices") and len(str(error.value)) < 250
