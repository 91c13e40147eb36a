"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in numpy.

A pure function from (counter, key) to four 32-bit words: no state, any order, any subset. Checked
against the known-answer vectors of Random123.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments: golden ratio, sqrt(3) - 1
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox_words(
    counter: tuple[NDArray[np.uint64], int, int, int], key: tuple[int, int]
) -> tuple[NDArray[np.uint64], ...]:
    """Four arrays of 32-bit words (held in uint64), one block per element of `counter[0]`."""
    mask, half = np.uint64(_MASK), np.uint64(32)
    multiplier0, multiplier1 = (np.uint64(m) for m in _MULTIPLIERS)
    c0 = counter[0]
    c1, c2, c3 = (np.full_like(c0, word) for word in counter[1:])
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * multiplier0  # 32 x 32 bits fit 64
        product1 = c2 * multiplier1
        c0 = (product1 >> half) ^ c1 ^ np.uint64(key0)
        c2 = (product0 >> half) ^ c3 ^ np.uint64(key1)
        c1 = product1 & mask
        c3 = product0 & mask
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: int, position: int, stream: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """One value in (0, 1) per id, keyed by (seed, position, stream, id). `ids` are >= 0."""
    first, count = (int(ids[0]), len(ids)) if len(ids) else (0, 0)
    key = (seed & _MASK, seed >> 32)
    is_range = count > 8 and int(ids[-1]) - first == count - 1
    blocks = (ids >> 2).astype(np.uint64)
    if is_range:  # no block twice
        blocks = np.arange(first // 4, (first + count - 1) // 4 + 1, dtype=np.uint64)
    words = np.stack(philox_words((blocks, position, stream, 0), key), axis=1)
    if is_range:
        drawn = words.reshape(-1)[first % 4 : first % 4 + count]
    else:
        drawn = words[np.arange(count), ids & 3]
    return (drawn.astype(np.float64) + 0.5) * 2.0**-32


def uniform(seed: int, position: int, stream: int) -> float:
    """The single value keyed by (seed, position, stream), in (0, 1)."""
    return float(uniforms(seed, position, stream, np.zeros(1, np.int64))[0])
