"""Beams with common beginnings as a tree: published vectors, the matrix formulas, and a trie."""

from __future__ import annotations

import numpy as np
import pytest
from support.beam_reference import choose, pack, trie

from llmctl.runtime.drafting.drafts import ROOT
from llmctl.runtime.drafting.redrafter.packing import merge
from llmctl.runtime.generate.accept import accept_tokens

CASES = {  # of Apple's tree_attention_test.py, which TensorRT-LLM's tests have, too
    "A": {
        "beams": ["91 92 93 95", "91 92 94 96", "91 92 93 97"],
        "owner": "0000 0011 0002",
        "tokens": "91 92 93 95 94 96 97",
        "flat": "0 1 2 3 6 7 11",
        "unpacker": "0123 0145 0126",
        "depth": "0 1 2 3 2 3 3",
        "parents": "-1 0 1 2 1 4 2",
        "visible": {0, 1, 2, 6},
    },
    "B": {
        "beams": ["93 94 95 92", "93 95 96 93", "93 94 97 96"],
        "owner": "0000 0111 0022",
        "tokens": "93 94 95 92 95 96 93 97 96",
        "flat": "0 1 2 3 5 6 7 10 11",
        "unpacker": "0123 0456 0178",
        "depth": "0 1 2 3 1 2 3 2 3",
        "parents": "-1 0 1 2 0 4 5 1 7",
        "visible": {0, 1, 7, 8},
    },
    "a search": {  # the beams that the golden search finds
        "beams": ["3 7 7 7", "3 0 7 7", "3 7 7 6"],
        "owner": "0000 0111 0002",
        "tokens": "3 7 7 7 0 7 7 6",
        "flat": "0 1 2 3 5 6 7 11",
        "unpacker": "0123 0456 0127",
        "depth": "0 1 2 3 1 2 3 3",
        "parents": "-1 0 1 2 0 4 5 2",
        "visible": {0, 1, 2, 7},
    },
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def digits(text: str) -> list[list[int]]:
    return [[int(digit) for digit in word] for word in text.split()]


def tree_of(beams, room=10**6):
    """`merge`, with the root of beams that have one as index 0."""
    drafts = merge(beams[:, 1:], room)
    parents = drafts.parents or range(ROOT, len(drafts.tokens) - 1)
    return [int(beams[0, 0]), *drafts.tokens], [-1, *(parent + 1 for parent in parents)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_published_beams_are_packed_as_published(case):
    beams = np.array([numbers(text) for text in case["beams"]])
    packed = pack(beams)
    assert packed.owner.tolist() == digits(case["owner"])
    assert packed.tokens == numbers(case["tokens"]) and packed.flat == numbers(case["flat"])
    assert packed.unpacker.tolist() == digits(case["unpacker"])
    assert packed.depth == numbers(case["depth"])
    assert packed.parents == numbers(case["parents"])
    assert packed.visible(len(packed.tokens) - 1) == case["visible"]
    assert tree_of(beams) == (packed.tokens, packed.parents)


def some_beams(seed: int):
    """Few tokens, so that beginnings and whole beams are alike."""
    generator = np.random.default_rng(seed)
    count, length = generator.integers(1, 9), generator.integers(1, 7)
    beams = generator.integers(0, int(generator.choice([1, 2, 3, 50])), (count, 1 + length))
    beams[:, 0] = 7
    return beams


@pytest.mark.parametrize("seed", range(200))
def test_any_beams_are_packed_as_the_formulas_say(seed):
    beams = some_beams(seed)
    tokens, parents = tree_of(beams)
    packed = pack(beams)
    assert (tokens, parents) == (packed.tokens, packed.parents)

    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    wanted = trie(beams)
    assert len(set(paths)) == len(paths) and set(paths) == set(wanted)
    assert len(paths) <= 1 + beams.shape[0] * (beams.shape[1] - 1)
    for path, parent in zip(paths, parents, strict=True):
        assert (paths[parent] if parent >= 0 else ()) == wanted[path]
    for index in range(len(paths)):
        own = {place for place, path in enumerate(paths) if path == paths[index][: len(path)]}
        assert own == packed.visible(index)


@pytest.mark.parametrize("seed", range(60))
def test_less_room_has_the_first_drafts(seed):
    """The first beam before the second: what is cut off is what is least likely."""
    beams = some_beams(seed)
    whole = tree_of(beams)
    for room in range(1, len(whole[0])):
        tokens, parents = tree_of(beams, room)
        assert (tokens, parents) == (whole[0][: room + 1], whole[1][: room + 1])


def test_one_beam_is_a_chain():
    assert merge(np.array([[4, 4, 5]]), 9).parents is None
    assert merge(np.array([[4, 4, 5], [4, 4, 5]]), 9).parents is None
    assert merge(np.array([[4, 4, 5], [4, 4, 6]]), 3).parents is None
    assert merge(np.array([[4, 4, 5], [4, 4, 6]]), 4).parents == [-1, 0, 1, 1]


@pytest.mark.parametrize(
    ("targets", "accepted", "beam"),
    [
        (["2345", "2346", "3468"], 3, 0),
        (["1346", "2545", "7468"], 1, 1),
        (["8346", "8545", "8468"], 0, 0),
    ],
)
def test_the_published_greedy_choice_is_the_accepted_path(targets, accepted, beam):
    """Of Apple's recurrent_drafting_test.py: the target's row of a token is that of the first beam
    that has it, as beams with one beginning share rows there."""
    beams = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 3, 4, 5]])
    said = np.array([[int(digit) for digit in text] for text in targets])
    assert choose(beams, said) == (accepted, beam)


@pytest.mark.parametrize("seed", range(200))
def test_the_accepted_path_is_that_of_the_longest_beam(seed):
    """Where rows are shared, as by one verification, the rule of trees accepts as many as the best
    of the beams, and the target's next token is the same."""
    beams = some_beams(seed)
    said = {path: hash((seed, path)) % 3 for path in trie(beams)}
    targets = np.array(
        [[said[tuple(beam[: place + 1])] for place in range(len(beam))] for beam in beams.tolist()]
    )
    accepted, beam = choose(beams, targets)
    drafts = merge(beams[:, 1:], 10**6)
    tokens, parents = tree_of(beams)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    path, following = accept_tokens(drafts, [said[own] for own in paths])
    assert len(path) == accepted
    assert [drafts.tokens[index] for index in path] == beams[beam, 1 : 1 + accepted].tolist()
    assert following == targets[beam, accepted]


@pytest.mark.parametrize("name", CASES)
def test_the_first_path_of_a_tree_is_its_best_beam(name):
    """Accepted drafts beside it are those that move, whatever else is accepted."""
    case = CASES[name]
    beams = np.array([numbers(beam) for beam in case["beams"]])
    drafts = merge(beams[:, 1:], 10**6)
    assert drafts.num_first == beams.shape[1] - 1
    assert drafts.tokens[: drafts.num_first] == beams[0, 1:].tolist()
    assert merge(beams[:1, 1:], 2).num_first == 2 and merge(beams, 0).num_first == 0
