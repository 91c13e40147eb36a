"""The controllers of the chunk size against machines of known cost, with noise and outliers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.schedule.chunk_tuning import AwaitedSteps, ChunkTuner, KneeTuner, LatencyTuner

BLOCK, MOST = 32, 4096
Cost = Callable[[int], float]


def linear(fixed_s: float, token_s: float) -> Cost:
    return lambda num_tokens: fixed_s + token_s * num_tokens


def roofline(floor_s: float, token_s: float) -> Cost:
    """A GPU: reading the weights takes floor_s, products token_s a token, whichever is longer."""
    return lambda num_tokens: (floor_s**4 + (token_s * num_tokens) ** 4) ** 0.25 + 2e-4


MACHINES = {
    "cpu": linear(0.002, 1e-3),
    "cpu with overhead": linear(0.02, 3e-4),
    "8B on a GPU": roofline(0.002, 14e-6),
    "70B on a GPU": roofline(0.0165, 119e-6),
    "fixed cost": linear(0.01, 1e-6),
}


def run(
    tuner: ChunkTuner, cost: Cost, num_steps: int, noise: float = 0.0, outliers: float = 0.0
) -> list[tuple[int, float]]:
    """(tokens, seconds) of steps that are always full."""
    chance, steps = random.Random(1), []
    for _ in range(num_steps):
        num_tokens = tuner.budget
        step_s = cost(num_tokens) * (1 + chance.uniform(-noise, noise))
        if chance.random() < outliers:
            step_s *= 3
        tuner.observe(num_tokens, step_s)
        steps.append((num_tokens, step_s))
    return steps


def speed(steps: list[tuple[int, float]]) -> float:
    return sum(n for n, _ in steps) / sum(s for _, s in steps)


def best_fixed(cost: Cost, sizes) -> int:
    return max(sizes, key=lambda size: size / cost(size))


@pytest.mark.parametrize("fixed_s", [0.0, 0.002, 0.010])
@pytest.mark.parametrize("token_s", [1e-6, 8e-6, 30e-6, 150e-6, 1e-3])
def test_steps_settle_on_the_largest_block_multiple_within_the_target(fixed_s, token_s):
    tuner = LatencyTuner(0.020, BLOCK, MOST)
    steps = run(tuner, linear(fixed_s, token_s), 200)
    best = int((0.020 - fixed_s) / token_s / BLOCK + 1e-9) * BLOCK
    best = min(max(best, BLOCK), MOST)
    assert {n for n, _ in steps[50:]} <= {best - BLOCK, best}
    assert all(s <= 0.020 * 1.01 for n, s in steps if n > BLOCK)  # not even while it learns


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("factor", [1.5, 3.0, 10.0])
def test_with_noise_steps_stay_within_the_target_at_the_speed_of_the_best_fixed_size(
    machine, factor
):
    cost, noise = MACHINES[machine], 0.04
    target_s = factor * cost(BLOCK)
    steps = run(LatencyTuner(target_s, BLOCK, MOST), cost, 600, noise, outliers=0.01)
    settled = [(n, s) for n, s in steps[100:] if s < 2 * cost(n)]  # but the outliers themselves
    assert sum(s > target_s for _, s in settled) <= 0.05 * len(settled)
    # The best fixed size has the same to keep: its slow steps are within the target too.
    fits = [n for n in range(BLOCK, MOST + 1, BLOCK) if cost(n) * (1 + noise) <= target_s]
    best = best_fixed(cost, fits)
    assert speed(settled) >= 0.95 * best / cost(best)


def test_the_budget_follows_a_machine_that_becomes_faster_and_slower():
    tuner = LatencyTuner(0.020, BLOCK, MOST)
    assert 160 <= run(tuner, linear(0.001, 100e-6), 300, noise=0.05)[-1][0] <= 192
    assert 1600 <= run(tuner, linear(0.001, 10e-6), 100, noise=0.05)[-1][0] <= 1920
    assert 32 <= run(tuner, linear(0.001, 400e-6), 20, noise=0.05)[-1][0] <= 64


def test_one_slow_step_costs_no_throughput():
    tuner = LatencyTuner(0.020, BLOCK, MOST)
    before = run(tuner, linear(0.001, 20e-6), 100)[-1][0]
    tuner.observe(before, 0.2)
    assert tuner.budget >= 0.9 * before


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), max_size=60), st.booleans())
def test_the_budget_never_leaves_one_block_to_max_num_tokens(steps, is_auto):
    tuner = KneeTuner(16, 400) if is_auto else LatencyTuner(0.02, 16, 400)
    for num_tokens, step_s in steps:
        budget = tuner.observe(num_tokens, max(step_s, 1e-6) if is_auto else step_s)
        assert 16 <= budget <= 400 and (budget % 16 == 0 or budget == 400)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_knee_is_short_and_within_5_percent_of_the_best_fixed_size(machine):
    cost, tuner = MACHINES[machine], KneeTuner(BLOCK, MOST)
    run(tuner, cost, 60, noise=0.04)
    steps = run(tuner, cost, 2000, noise=0.04, outliers=0.01)  # measuring anew included
    best = best_fixed(cost, range(BLOCK, MOST + 1, BLOCK))
    settled = [(n, s) for n, s in steps if s < 2 * cost(n)]
    assert speed(settled) >= 0.95 * best / cost(best)
    # Half of what it chose would cost too much: nothing is left to gain in latency.
    chosen = tuner.budget
    assert chosen == BLOCK or chosen // 2 / cost(chosen // 2) < 0.985 * best / cost(best)


def test_the_knee_follows_a_machine_that_changes():
    tuner = KneeTuner(BLOCK, MOST)
    run(tuner, MACHINES["fixed cost"], 100)
    assert tuner.budget == MOST
    run(tuner, MACHINES["cpu"], 2500)
    assert tuner.budget <= 128


def test_steps_that_are_not_full_say_nothing_of_the_knee():
    tuner = KneeTuner(BLOCK, MOST)
    for _ in range(100):
        assert tuner.observe(40, 1.0) == MOST


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("max_step_s", [0.005, 0.020])
def test_steps_that_nobody_waits_for_count_when_their_end_is_seen(every, max_step_s):
    """A device takes what is started and says when it is done every so many steps only."""
    cost = MACHINES["8B on a GPU"]
    tuner = AwaitedSteps(LatencyTuner(max_step_s, BLOCK, MOST))
    under_way_s, times = 0.0, []
    for index in range(1, 400):
        num_tokens = tuner.budget
        times.append(cost(num_tokens))
        under_way_s += times[-1]
        if index % every:
            tuner.observe(num_tokens, 1e-3, was_awaited=False)
            under_way_s -= 1e-3
        else:
            tuner.observe(num_tokens, under_way_s, was_awaited=True)
            under_way_s = 0.0
    assert sum(seconds > 1.01 * max_step_s for seconds in times) <= 3 * every
    assert 0.75 * max_step_s <= min(times[-50:]) <= max(times[-50:]) <= 1.01 * max_step_s


def test_the_knee_is_found_from_steps_that_nobody_waits_for():
    cost = MACHINES["8B on a GPU"]
    tuner = AwaitedSteps(KneeTuner(BLOCK, MOST))
    awaited = KneeTuner(BLOCK, MOST)
    for _ in range(100):
        started_s = 0.0
        for was_awaited in (False, False, True):
            budget = tuner.budget
            started_s += cost(budget)
            tuner.observe(budget, started_s if was_awaited else 0.0, was_awaited=was_awaited)
        awaited.observe(awaited.budget, cost(awaited.budget))
    assert tuner.budget == awaited.budget < MOST
