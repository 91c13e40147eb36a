"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in numpy.

A pure function from (counter, key) to four 32-bit words: no state, any order, any subset. Checked
against the known-answer vectors of Random123.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)  # key steps: golden ratio, sqrt(3) - 1
_AS_INTEGERS = [int(n) for n in _MULTIPLIERS[:, 0]], [int(n) for n in _WEYL[:, 0]]
_NUM_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_STEPS = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_FEW = 12  # ids of all draws; up to here Python's integers are faster than numpy's calls
_SMALL_DRAW = 512  # ids; below this a draw costs numpy calls, not arithmetic, so draws are joined


@dataclass(frozen=True, slots=True)
class Draw:
    """Asks for one uniform per id, keyed by (seed, position, stream, id). `ids` ascend from 0."""

    seed: int
    position: int
    stream: int
    ids: NDArray[np.int64]


def philox_words(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four 32-bit words (held in uint64) [4, n] per block: counter [4, n], key [2, n] or [2, 1]."""
    keys = (key + _STEPS) & _MASK  # [rounds, 2, n or 1]
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2 are the factors of a round
    for round_key in keys:
        product = even * _MULTIPLIERS  # 32 x 32 bits fit 64
        even = (product >> _HALF)[::-1] ^ odd
        even ^= round_key
        odd = (product & _MASK)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def block_words(block: int, draw: Draw) -> tuple[int, int, int, int]:
    """The four words of one block of a draw, as `philox_words` gives them."""
    multipliers, steps = _AS_INTEGERS
    a, b, c, d = block, draw.position, draw.stream, 0
    low, high = draw.seed & 0xFFFFFFFF, (draw.seed >> 32) & 0xFFFFFFFF
    for _ in range(_NUM_ROUNDS):
        first, second = a * multipliers[0], c * multipliers[1]
        a, b = (second >> 32) ^ b ^ low, second & 0xFFFFFFFF
        c, d = (first >> 32) ^ d ^ high, first & 0xFFFFFFFF
        low, high = (low + steps[0]) & 0xFFFFFFFF, (high + steps[1]) & 0xFFFFFFFF
    return a, b, c, d


def uniforms(draws: Sequence[Draw]) -> list[NDArray[np.float64]]:
    """For each draw, one value in (0, 1) per id. Word id % 4 of block id // 4 belongs to an id."""
    if sum(len(draw.ids) for draw in draws) <= _FEW:
        return [np.array([_fraction_of(draw, id_) for id_ in draw.ids.tolist()]) for draw in draws]
    small = [index for index, draw in enumerate(draws) if len(draw.ids) < _SMALL_DRAW]
    results: list[NDArray[np.float64]] = [_EMPTY] * len(draws)
    if small:
        sizes = [len(draws[index].ids) for index in small]
        joined = _fraction(_words_of_ids([draws[index] for index in small], sizes))
        end = 0
        for index, size in zip(small, sizes, strict=True):
            results[index] = joined[end : end + size]
            end += size
    for index, draw in enumerate(draws):
        if len(draw.ids) >= _SMALL_DRAW:
            results[index] = _fraction(_words_of_range(draw)[draw.ids - (draw.ids[0] & ~3)])
    return results


def uniform(seed: int, position: int, stream: int) -> float:
    """The single value keyed by (seed, position, stream), in (0, 1)."""
    return float(uniforms([Draw(seed, position, stream, np.zeros(1, np.int64))])[0][0])


_EMPTY = np.empty(0)


def _words_of_ids(draws: Sequence[Draw], sizes: list[int]) -> NDArray[np.uint64]:
    """One word per id of all draws in a row, each from its own block."""
    ids = np.concatenate([draw.ids for draw in draws])
    constants = [
        (draw.position, draw.stream, 0, draw.seed & 0xFFFFFFFF, draw.seed >> 32) for draw in draws
    ]
    columns = np.array(constants, np.uint64).T.repeat(sizes, axis=1)  # [5, ids]
    counter = np.concatenate(((ids >> 2).astype(np.uint64)[None], columns[:3]))
    words = philox_words(counter, columns[3:])
    chosen: NDArray[np.uint64] = words[ids & 3, np.arange(len(ids))]
    return chosen


def _words_of_range(draw: Draw) -> NDArray[np.uint64]:
    """The words of every id from the block of the first to the block of the last."""
    blocks = np.arange(draw.ids[0] >> 2, (draw.ids[-1] >> 2) + 1, dtype=np.uint64)
    counter = np.empty((4, len(blocks)), np.uint64)
    counter[0] = blocks
    counter[1:] = np.array([[draw.position], [draw.stream], [0]], np.uint64)
    key = np.array([[draw.seed & 0xFFFFFFFF], [draw.seed >> 32]], np.uint64)
    return philox_words(counter, key).T.reshape(-1)


def _fraction_of(draw: Draw, id_: int) -> float:
    return (block_words(id_ >> 2, draw)[id_ & 3] + 0.5) * 2.0**-32


def _fraction(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (words.astype(np.float64) + 0.5) * 2.0**-32
