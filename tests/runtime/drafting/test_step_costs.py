"""The costs of steps as they are learned from measured ones."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.runtime.drafting.length.costs import StepCosts


def test_costs_are_learned_by_batch_size_and_drawn_in_straight_lines():
    costs = StepCosts()
    assert costs.plain_s(4) is None
    for _ in range(2):  # the first of a kind is not counted
        costs.observe(4, 0, 0, 1.0, 0.0)
        costs.observe(4, 2, 8, 1.6, 0.4)
        costs.observe(4, 4, 16, 2.6, 0.8)
    assert costs.plain_s(3) == costs.plain_s(4) == 1.0 and costs.plain_s(5) is None
    assert costs.draft_s(4) == costs.draft_s(64) == pytest.approx(0.2)
    assert costs.extra_s(4, 4) == pytest.approx(0.1)
    assert costs.extra_s(4, 12) == pytest.approx(0.5)
    assert costs.extra_s(4, 32) == pytest.approx(1.6)
    assert costs.step_s(4, 4, 16) == pytest.approx(2.6)


def test_what_begins_a_round_is_told_from_another_step_of_the_drafter():
    costs, chance = StepCosts(), np.random.default_rng(3)
    for _ in range(60):
        depth = int(chance.integers(1, 6))
        draft_s = (0.12 + 0.02 * depth) * chance.uniform(0.95, 1.05)
        costs.observe(1, depth, depth, 1.0 + draft_s, draft_s)
    assert costs.draft_s(1) == pytest.approx(0.02, rel=0.35)
    for depth in (1, 3, 5):
        assert costs.drafting_s(1, depth) == pytest.approx(0.12 + 0.02 * depth, rel=0.1)
    assert costs.drafting_s(1, 0) == 0.0


def test_one_draft_more_is_told_from_what_the_first_brings_whatever_the_machine_does():
    """Also where plain steps were timed when it was slower."""
    for plain_s in (0.7, 1.5):
        costs, chance = StepCosts(), np.random.default_rng(5)
        assert costs.token_s(1, 0.2) == 0.2
        for _ in range(3):
            costs.observe(1, 0, 0, plain_s, 0.0)
        for step in range(100):
            count = int(chance.integers(1, 6))
            step_s = (0.8 + 0.05 * count + 0.001 * step) * chance.uniform(0.98, 1.02)
            costs.observe(1, count, count, step_s + 0.1, 0.1)
        assert costs.token_s(1, 0.2) == pytest.approx(0.05, rel=0.5)
    falling = StepCosts()
    for count in (1, 2, 3, 4) * 9:
        falling.observe(1, count, count, 1 - 0.1 * count, 0.0)
    assert falling.token_s(1, 0.1) == 0.0


def test_the_time_of_one_depth_is_shared_out_and_one_of_nothing_is_nothing():
    costs = StepCosts()
    for _ in range(5):
        costs.observe(1, 4, 4, 1.4, 0.4)
        costs.observe(8, 3, 3, 1.0, 0.0)
    assert costs.draft_s(1) == pytest.approx(0.1) and costs.drafting_s(1, 2) == pytest.approx(0.2)
    assert costs.draft_s(8) == costs.drafting_s(8, 5) == 0.0


def test_a_cost_that_seemed_to_be_nothing_is_found():
    costs = StepCosts()
    for _ in range(9):
        costs.observe(1, 0, 0, 1.0, 0.0)
    for _ in range(4):
        costs.observe(1, 1, 1, 0.9, 0.0)
    assert costs.extra_s(1, 1) == 0.0
    for _ in range(60):
        costs.observe(1, 1, 1, 1.3, 0.0)
    assert costs.extra_s(1, 1) == pytest.approx(0.3, rel=0.05)


def test_one_step_far_off_moves_a_cost_little():
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 0, 0, 1.0, 0.0)
    costs.observe(1, 0, 0, 100.0, 0.0)
    assert costs.plain_s(1) == pytest.approx(1.1)


def test_fewer_drafts_cost_no_more_than_more_do():
    """One size was timed when the machine had something else to do."""
    costs = StepCosts()
    for _ in range(2):
        costs.observe(1, 0, 0, 1.0, 0.0)
        for count, step_s in ((1, 4.0), (2, 1.2), (4, 1.4)):
            costs.observe(1, count, count, step_s, 0.0)
    assert costs.extra_s(1, 1) == pytest.approx(0.2) and costs.extra_s(1, 2) == pytest.approx(0.2)
    assert costs.extra_s(1, 3) == pytest.approx(0.3)


def test_the_price_of_a_draft_is_that_of_steps_which_nothing_else_delayed():
    costs, chance = StepCosts(), np.random.default_rng(7)
    assert costs.usual_s(1) is None
    prices = []
    for _ in range(600):
        count = int(chance.integers(1, 5))
        delay_s = chance.exponential(0.5) if chance.random() < 0.3 else 0.0
        costs.observe(1, count, count, 0.7 + 0.06 * count + delay_s, 0.1)
        prices.append(costs.token_s(1, 0.06))
    assert 0.4 * 0.06 < np.median(prices[100:]) < 1.6 * 0.06
    assert costs.usual_s(1) == pytest.approx(0.85, rel=0.1)
