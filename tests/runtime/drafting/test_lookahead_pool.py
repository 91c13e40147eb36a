"""The pool of n-grams against a dictionary of lists."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.runtime.drafting.lookahead.pool import MOST_READ, ROWS, NgramPool


@pytest.mark.parametrize("most", [1, 3, 15])
def test_the_newest_are_kept_and_one_seen_again_becomes_the_newest(most):
    generator = np.random.default_rng(most)
    pool, wanted = NgramPool(3, most), {}
    for _ in range(2000):
        token, *ngram = generator.integers(0, 5, 3).tolist()
        pool.add(token, tuple(ngram))
        known = wanted.setdefault(token, [])
        known[:] = [*(one for one in known if one != tuple(ngram)), tuple(ngram)][-most:]
        assert list(pool.after(token)) == known
    assert list(pool.after(7)) == []


def test_tokens_of_one_row_take_it_from_each_other():
    pool = NgramPool(2, 4)
    pool.add(3, (1,))
    pool.add(3 + ROWS, (2,))
    assert list(pool.after(3)) == [] and list(pool.after(3 + ROWS)) == [(2,)]
    pool.add(3, (5,))
    assert list(pool.after(3)) == [(5,)] and list(pool.after(3 + ROWS)) == []
    for token in range(10 * ROWS):
        pool.add(token, (token,))
    assert len(pool.rows) == ROWS


def test_a_text_is_read_once_as_far_as_it_has_grown():
    text = np.random.default_rng(0).integers(0, 9, 300).tolist()
    whole, parts = NgramPool(4, 5), NgramPool(4, 5)
    whole.read(text)
    for end in (0, 1, 3, 4, 5, 60, 60, 299, 300):
        parts.read(text[:end])
    assert whole.rows == parts.rows
    assert list(whole.after(text[-4]))[-1] == tuple(text[-3:])


def test_of_a_long_text_the_end_is_read():
    pool = NgramPool(2, 1)
    pool.read([8, 1, *[5] * MOST_READ, 6])
    assert not pool.after(8) and list(pool.after(5)) == [(6,)]


def test_a_pool_without_room_keeps_nothing():
    pool = NgramPool(3, 0)
    pool.read([1, 2, 3, 1, 2, 3])
    assert not pool.after(1) and not pool.rows
