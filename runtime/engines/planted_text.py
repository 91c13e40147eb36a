"""What planted weights say: the text of a target, the tokens of a draft and of draft heads.

`next` of a target is one cycle over all ordinary tokens, so no text repeats. A draft of the same
seed agrees with it at each token with the given probability, independently. So acceptance is a
known number, and speed can be measured at any acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Recipe = Mapping[str, object]
"""`weights` of a planted engine's config.json."""


def next_tokens(weights: Recipe) -> NDArray[np.int64]:
    """next [stop]: the token that follows each ordinary one; -1 for the others."""
    first, stop, seed = _ordinary(weights)
    order = np.random.default_rng([seed, 0]).permutation(np.arange(first, stop))
    follows = np.full(stop, -1, np.int64)
    follows[order] = np.roll(order, -1)
    if weights["role"] == "target":
        return follows
    differs = np.random.default_rng([seed, 1]).random(stop) >= _acceptance(weights)
    wrong = np.flatnonzero(differs & (follows >= 0))
    # Exchanged among themselves, so that every token still follows exactly one other.
    follows[wrong] = np.roll(follows[wrong], 1)
    return follows


def second_tokens(weights: Recipe) -> NDArray[np.int64]:
    """The second likeliest token of a draft behind each ordinary one: where the likeliest is wrong,
    the right one with the given probability."""
    right = next_tokens({**weights, "role": "target"})
    _, stop, seed = _ordinary(weights)
    draw = np.random.default_rng([seed, 4]).random(stop)
    is_second = (next_tokens(weights) != right) & (draw < _acceptance(weights))
    return _exchanged(right, is_second, -1)


def planted_text(weights: Recipe, last: int, count: int) -> list[int]:
    """The greedy text of a planted target after a prompt that ends in the ordinary token `last`."""
    follows = next_tokens({**weights, "role": "target"})
    text = []
    for _ in range(count):
        last = int(follows[last])
        text.append(last)
    return text


def head_tokens(weights: Recipe, head: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(likeliest [stop], second likeliest [stop]): what a head says of each ordinary token, whose
    next but `head` is meant; -1 for the others."""
    follows = next_tokens({**weights, "role": "target"})
    right = follows
    for _ in range(head + 1):
        right = np.where(right >= 0, follows[right], -1)
    return _ranked(weights, right, [2, head])


def step_tokens(weights: Recipe) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same of what a step of a recurrent head says behind each ordinary token that it takes in:
    what follows that token is meant."""
    return _ranked(weights, next_tokens({**weights, "role": "target"}), [3])


def tokens_per_round(weights: Recipe, paths: Sequence[Sequence[int]]) -> float:
    """The expected tokens of a round that drafts these paths of head tokens by rank, the target's
    own included."""
    p = _acceptance(weights)
    shares = (p, p * (1 - p))
    at = [np.prod([shares[rank] if rank < 2 else 0.0 for rank in path]) for path in paths]
    return 1 + float(np.sum(at))


def _ranked(
    weights: Recipe, right: NDArray[np.int64], draws: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The right tokens, likeliest with the recipe's probability p, second likeliest with p (1 - p).
    draws: what tells these draws from others."""
    _, stop, seed = _ordinary(weights)
    p = _acceptance(weights)
    draw = np.random.default_rng([seed, *draws]).random(stop)
    is_first = draw < p
    is_second = ~is_first & (draw < p + p * (1 - p))
    return _exchanged(right, is_first, 1), _exchanged(right, is_second, -1)


def _exchanged(
    right: NDArray[np.int64], is_right: NDArray[np.bool_], step: int
) -> NDArray[np.int64]:
    """The right tokens where they are to be, elsewhere exchanged among themselves."""
    found = right.copy()
    wrong = np.flatnonzero(~is_right & (right >= 0))
    found[wrong] = np.roll(right[wrong], step)
    return found


def _ordinary(weights: Recipe) -> tuple[int, int, int]:
    bounds = weights["ordinary_tokens"]
    assert isinstance(bounds, list | tuple)
    return int(bounds[0]), int(bounds[1]), int(str(weights["seed"]))


def _acceptance(weights: Recipe) -> float:
    return float(str(weights["acceptance"]))
