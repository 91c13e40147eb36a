"""The waits around the ring of a launch of decoder layers, in many orders of events."""

from __future__ import annotations

import pytest
from ring_model import SHAPES, Block, shares

SEEDS = range(6)


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_everyone_comes_to_the_end(name, held):
    kinds = [units for units in shares(SHAPES[name]) if units[2] >= held]
    assert kinds
    for units in kinds[:3]:
        ends = [Block(units, held, full_alone=False).ends(seed) for seed in SEEDS]
        assert all(ends), units


def test_a_warp_that_is_late_could_wait_for_a_turn_that_is_over():
    units = shares(SHAPES["1b"])[0]
    ends = [Block(units, 0, full_alone=True).ends(seed) for seed in SEEDS]
    assert not all(ends), "the model does not find what it was made for"
