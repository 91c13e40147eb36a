"""How many tokens of a request a thread block of few_fp8.cu has."""

from __future__ import annotations

import pytest
from support.fp8_attention import AllFp8World

from llmctl.plugins.ops.paged_attention.few_fp8.cut import ROWS, choose_cut, cuts

CALLS = {
    heads: AllFp8World(heads=heads, kv_heads=8, size=128, lengths=(64,)).call([(0, 0, 1)])
    for heads in (8, 32, 64)
}


@pytest.mark.parametrize("heads", CALLS)
@pytest.mark.parametrize("tokens", range(1, 18))
def test_thread_blocks_have_all_tokens_and_no_more_rows_than_they_have_room_for(heads, tokens):
    found = cuts(CALLS[heads], tokens)
    assert [cut.rows for cut in found] == sorted({cut.rows for cut in found})
    for cut in found:
        assert cut.rows in ROWS and cut.tokens * heads // 8 <= cut.rows
        assert cut.tokens * (cut.blocks - 1) < tokens <= cut.tokens * cut.blocks


@pytest.mark.parametrize(
    ("heads", "tokens", "requests", "context", "rows"),
    [
        (64, 11, 1, 400, 8),
        (64, 11, 1, 1024, 8),
        (64, 11, 1, 2000, 32),
        (64, 11, 1, 8192, 48),
        (64, 11, 1, 32768, 88),
        (64, 11, 2, 1024, 32),
        (64, 11, 8, 1024, 48),
        (64, 11, 64, 1024, 88),
        (64, 4, 1, 1024, 8),
        (64, 4, 1, 8192, 32),
        (32, 11, 1, 1024, 8),
        (32, 11, 1, 8192, 48),
        (64, 1, 64, 32768, 8),
    ],
)
def test_the_fastest_of_those_measured(heads, tokens, requests, context, rows):
    assert choose_cut(CALLS[heads], tokens, requests, context, 132).rows == rows
