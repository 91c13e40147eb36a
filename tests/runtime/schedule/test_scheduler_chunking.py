"""Chunk sizes and fair shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.schedule.chunked_prefill import (
    Cuts,
    Unread,
    equal_progress_chunks,
    fair_shares,
    first_come_chunks,
    least_chunk,
)


@st.composite
def spans_and_cuts(draw):
    """Spans, some with tokens that are read in groups, and where they may be cut."""
    cuts = Cuts(draw(st.integers(1, 9)))
    cuts = cuts._replace(group=cuts.block * draw(st.integers(0, 3)))
    spans = []
    for _ in range(draw(st.integers(0, 6))):
        start, length = draw(st.integers(0, 40)), draw(st.integers(1, 60))
        end = 0
        if cuts.group and draw(st.booleans()):
            start, end = start // cuts.group * cuts.group, (start + length) // cuts.group
            end = cuts.group * draw(st.integers(0, end))
        spans.append(Unread(start, max(start, end - 1) + length, end))
    return spans, cuts


@given(spans_and_cuts(), st.integers(0, 100), st.booleans())
def test_chunks_keep_the_budget_and_end_at_block_borders(given, budget, equal):
    spans, cuts = given
    chunk = equal_progress_chunks if equal else first_come_chunks
    sizes = chunk(spans, budget, cuts)
    assert sum(sizes) <= budget
    for span, size in zip(spans, sizes, strict=True):
        assert 0 <= size <= span.end - span.start
        if 0 < size < span.end - span.start:
            cut = span.start + size
            assert cut % cuts.block == 0
            assert cut >= span.context_end or cut % cuts.group == 0


@given(spans_and_cuts(), st.integers(0, 100))
def test_equal_progress_stops_only_when_nobody_fits(given, budget):
    spans, cuts = given
    sizes = equal_progress_chunks(spans, budget, cuts)
    left = budget - sum(sizes)
    for span, size in zip(spans, sizes, strict=True):
        start = span.start + size
        assert start == span.end or least_chunk(span._replace(start=start), cuts) > left


def test_a_prompt_is_cut_at_groups_before_the_last_one_and_at_blocks_behind():
    span, cuts = Unread(256, 2000, 768), Cuts(32, 256)
    budgets = (255, 256, 511, 512, 600, 1744)
    found = [first_come_chunks([span], budget, cuts) for budget in budgets]
    assert found == [[0], [256], [256], [512], [576], [1744]]
    assert least_chunk(span, cuts) == 256
    assert least_chunk(span._replace(start=768), cuts) == 32


def test_first_come_without_chunking_takes_whole_prompts_and_nobody_overtakes():
    spans = [Unread(0, 5), Unread(2, 10), Unread(0, 1)]
    assert first_come_chunks(spans, 12, None) == [5, 0, 0]


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 60))
def test_fair_shares_use_the_budget_and_differ_by_at_most_one_where_cut(wants, budget):
    shares = fair_shares(wants, budget)
    assert sum(shares) == min(budget, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    cut = [share for share, want in zip(shares, wants, strict=True) if share < want]
    if cut:
        assert max(shares) - min(cut) <= 1
