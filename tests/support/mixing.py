"""Numbers that follow from tokens and look random: what a FakeEngine and its heads answer."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

MASK = 2**64 - 1
COEFFICIENTS = np.random.default_rng(0).integers(1, 2**63, 4096, dtype=np.uint64) | np.uint64(1)


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 -> uint64, well mixed."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mix_one(value: int) -> int:
    """The same of one number."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


@cache
def lanes(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def share(seed: int, count: int) -> np.ndarray:
    """`count` values in [0, 1) that follow from `seed`."""
    return (mix(lanes(count) ^ np.uint64(seed)) >> np.uint64(11)) / 2.0**53


@lru_cache(1 << 15)
def blend(tokens: bytes, count: int, whole_context: float) -> tuple[int, np.ndarray]:
    """`fold` of int64 tokens, and a row that follows from them: target and draft share it."""
    found = np.frombuffer(tokens, np.int64)
    everything = fold(found)
    row = 8 * share(fold(found[-2:]), count) + whole_context * share(everything, count)
    return everything, row


def fold(tokens: np.ndarray) -> int:
    """A number that changes with any token and its place."""
    products = (tokens.astype(np.uint64) + np.uint64(1)) * COEFFICIENTS[: len(tokens)]
    return mix_one(int(products.sum(dtype=np.uint64)))
