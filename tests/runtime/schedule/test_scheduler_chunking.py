"""Chunk sizes and fair shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.schedule.chunked_prefill import (
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
