"""Chunk sizes, fair shares, and the tuner against simulated machines."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.errors import BadConfig
from llmctl.runtime.chunking import (
    DynamicChunkTuner,
    equal_progress_chunks,
    fair_shares,
    first_come_chunks,
    least_chunk,
)

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), max_size=6).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


@given(SPANS, st.integers(0, 100), st.integers(1, 9), st.booleans())
def test_chunks_keep_the_budget_and_end_at_block_borders(spans, budget, block, equal):
    chunk = equal_progress_chunks if equal else first_come_chunks
    sizes = chunk(spans, budget, block)
    assert sum(sizes) <= budget
    for (start, end), size in zip(spans, sizes, strict=True):
        assert 0 <= size <= end - start
        if 0 < size < end - start:
            assert (start + size) % block == 0


@given(SPANS, st.integers(0, 100), st.integers(1, 9))
def test_equal_progress_stops_only_when_nobody_fits(spans, budget, block):
    sizes = equal_progress_chunks(spans, budget, block)
    left = budget - sum(sizes)
    for (start, end), size in zip(spans, sizes, strict=True):
        assert start + size == end or least_chunk(start + size, end, block) > left


def test_first_come_without_chunking_takes_whole_prompts_and_nobody_overtakes():
    assert first_come_chunks([(0, 5), (2, 10), (0, 1)], 12, None) == [5, 0, 0]


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 60))
def test_fair_shares_use_the_budget_and_differ_by_at_most_one_where_cut(wants, budget):
    shares = fair_shares(wants, budget)
    assert sum(shares) == min(budget, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    cut = [share for share, want in zip(shares, wants, strict=True) if share < want]
    if cut:
        assert max(shares) - min(cut) <= 1


def simulate(tuner, fixed_s, per_token_s, num_steps, noise=0.0):
    """Budgets over num_steps full steps of a machine with step time fixed + per_token * n."""
    generator = random.Random(1)
    budgets = []
    for _ in range(num_steps):
        step_s = fixed_s + per_token_s * tuner.budget
        tuner.observe(tuner.budget, step_s * (1 + noise * generator.uniform(-1, 1)))
        budgets.append(tuner.budget)
    return budgets


@pytest.mark.parametrize("fixed_s", [0.0, 0.002, 0.010])
@pytest.mark.parametrize("per_token_s", [1e-6, 8e-6, 30e-6, 150e-6, 1e-3])
def test_the_tuner_settles_on_the_largest_block_multiple_within_the_target(fixed_s, per_token_s):
    block, most, target_s = 32, 4096, 0.020
    tuner = DynamicChunkTuner(target_s, block, most)
    settled = simulate(tuner, fixed_s, per_token_s, 1000)[300:]
    best = int((target_s - fixed_s) / per_token_s / block + 1e-9) * block
    best = min(max(best, block), most)
    assert settled.count(best) >= 0.9 * len(settled)
    assert max(settled) <= best + block


def test_the_tuner_follows_a_machine_that_becomes_faster_and_slower():
    tuner = DynamicChunkTuner(0.020, 32, 4096)
    assert 160 <= simulate(tuner, 0.001, 100e-6, 300, noise=0.05)[-1] <= 192
    assert 1600 <= simulate(tuner, 0.001, 10e-6, 600, noise=0.05)[-1] <= 1920
    assert 32 <= simulate(tuner, 0.001, 400e-6, 300, noise=0.05)[-1] <= 64


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), max_size=60))
def test_the_tuner_never_leaves_one_block_to_max_num_tokens(steps):
    tuner = DynamicChunkTuner(0.02, 16, 400)
    for num_tokens, step_s in steps:
        assert 16 <= tuner.observe(num_tokens, step_s) <= 400


def test_short_steps_do_not_raise_the_budget_and_slow_steps_lower_it():
    tuner = DynamicChunkTuner(0.02, 16, 256)
    assert tuner.observe(256, 0.04) == 128
    assert tuner.observe(20, 0.001) == 128
    assert tuner.observe(128, 0.021) < 128


def test_a_target_of_zero_is_refused():
    with pytest.raises(BadConfig, match="max_step_ms is 0"):
        DynamicChunkTuner(0, 16, 256)
