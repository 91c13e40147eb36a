"""The waits around the ring of a launch of decoder layers, in many orders of events."""

from __future__ import annotations

import pytest

from scripts.profile.ring_model import SHAPES, AnotherTurn, Block, shares

SEEDS = range(6)


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_everyone_comes_to_the_end(name, held):
    kinds = [units for units in shares(SHAPES[name]) if units[2] >= held]
    assert kinds
    for units in kinds[:3]:
        ends = [Block(units, held).ends(seed) for seed in SEEDS]
        assert all(ends), units


def test_a_warp_that_is_late_could_wait_for_a_turn_that_is_over():
    units = shares(SHAPES["1b"])[0]
    ends = [Block(units, full_alone=True).ends(seed) for seed in SEEDS]
    assert not all(ends), "the model does not find what it was made for"


@pytest.mark.parametrize(("stages", "most"), [(4, 9), (5, 12)])
def test_a_team_takes_no_unit_before_it_is_there(stages, most):
    """As many chunks on their way as product.cuh lets through in an odd ring, and an even one."""
    for units in shares(SHAPES["8b"]):
        block = [Block(units, stages=stages, pace=(most, most, most)) for _ in SEEDS]
        assert all(each.ends(seed) for each, seed in zip(block, SEEDS, strict=True)), units


@pytest.mark.parametrize("stages", [4, 11])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_units_may_be_taken_before_their_tokens_are_there(name, ahead, stages):
    """As product.cuh takes 4-bit weights."""
    for units in shares(SHAPES[name])[:2]:
        block = [Block(units, stages=stages, ahead=ahead) for _ in SEEDS]
        assert all(each.ends(seed) for each, seed in zip(block, SEEDS, strict=True)), units


def test_a_short_odd_ring_with_much_on_its_way_would_let_a_team_do_so():
    units = shares(SHAPES["8b"])[0]
    with pytest.raises(AnotherTurn):
        for seed in range(40):
            Block(units, stages=3, pace=(9, 9, 9)).ends(seed)
