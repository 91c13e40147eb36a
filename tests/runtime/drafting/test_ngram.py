"""Prompt lookup: which tokens it proposes, and what indexing them costs."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import Batch, Request, Sequence, Slice


def lookup(drafter: NgramDrafter, tokens: list[int], draft_len: int = 4, sequence_id=1):
    request = Request(tuple(tokens), 10)
    sequence = Sequence(sequence_id, 1, request, 0, tokens, len(tokens), len(tokens) + 10)
    batch = Batch(generation=(Slice(sequence, len(tokens) - 1, 1, draft_len),))
    return drafter.propose(batch)[0].tokens


def naive(tokens: list[int], num_tokens: int, max_ngram: int) -> list[int]:
    """Longest suffix, latest earlier occurrence, copied token by token."""
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                grown = list(tokens)
                for offset in range(num_tokens):
                    grown.append(grown[end + offset])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3], []),
        ([1], []),
        ([7, 7], [7, 7, 7, 7]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the latest of equal lengths
        ([5, 1, 2, 9, 1, 2, 8, 5, 1, 2], [9, 1, 2, 8]),  # the longest before the latest
    ],
)
def test_the_longest_then_latest_occurrence_is_continued(tokens, wanted):
    assert lookup(NgramDrafter(4), tokens) == wanted


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_growing_histories_agree_with_a_naive_scan(max_ngram):
    generator = np.random.default_rng(max_ngram)
    drafter = NgramDrafter(6, max_ngram)
    tokens = generator.integers(0, 4, 5).tolist()
    request = Request(tuple(tokens), 400)
    sequence = Sequence(1, 1, request, 0, tokens, 5, 405)
    while len(tokens) < 300:
        draft_len = int(generator.integers(0, 8))
        batch = Batch(generation=(Slice(sequence, len(tokens) - 1, 1, draft_len),))
        found = drafter.propose(batch)[0].tokens
        assert found == naive(tokens, min(draft_len, 6), max_ngram)
        tokens += generator.integers(0, 4, generator.integers(1, 6)).tolist()


def test_a_released_sequence_leaves_nothing_behind():
    drafter = NgramDrafter(4)
    assert lookup(drafter, [1, 2, 1]) == [2, 1, 2, 1]
    drafter.release(Sequence(1, 1, Request((1,), 1), 0, [1], 1, 2))
    assert lookup(drafter, [5, 6]) == []


def test_each_token_is_indexed_once():
    class Counted(list):
        sliced = 0

        def __getitem__(self, key):
            if isinstance(key, slice):
                Counted.sliced += 1
            return super().__getitem__(key)

    tokens = Counted(range(1000))
    drafter = NgramDrafter(4)
    sequence = Sequence(1, 1, Request((1,), 1), 0, tokens, 1000, 2000)
    for _ in range(50):
        drafter.propose(Batch(generation=(Slice(sequence, len(tokens) - 1, 1, 4),)))
        tokens.append(len(tokens))
    assert Counted.sliced < 1050 * 3 + 50 * 4


@pytest.mark.parametrize("values", [(0, 3), (4, 0)])
def test_sizes_below_one_are_refused(values):
    with pytest.raises(BadConfig, match="at least 1"):
        NgramDrafter(*values)
