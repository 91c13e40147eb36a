"""Beam search with a recurrent head, many requests at once, each of a length of its own.

Scores are sums of log-probabilities in float32. Every beam offers its likeliest tokens, as many as
there are beams, and the best of all offers are the next beams: by score, and where scores are equal
by beam and then by token, the smaller first. No beam ends early, and lengths are not weighed: a
token that ends a text is one like any other.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Offers = tuple[Ids, Scores]  # [rows, count] each: tokens, the likeliest first, and their log-probs


class Head(Protocol):
    """What runs the steps of a recurrent head; `EngineHead` is one."""

    def first(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """Behind `tokens` [N], each of which was drawn from a row of the target's last step."""

    def next(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """Behind `tokens` [N], each of which continues a row of the step before."""


def search(
    head: Head, rows: Items[int], roots: Items[int], lengths: Items[int], num_beams: int
) -> list[NDArray[np.int64]]:
    """The beams [num_beams, length] of every request, the best first, without the roots.

    rows: of the target's last step, that the roots were drawn from. lengths: at least 1.
    """
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])  # those that end first last
    as_int32 = [np.array([values[i] for i in order], np.int32) for values in (rows, roots)]
    tokens, scores = head.first(as_int32[0], as_int32[1], num_beams)
    beams = tokens[:, :, None]  # [requests, beams, tokens]
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows)
    parents = np.repeat(np.arange(len(rows)), num_beams)  # rows of the step before
    for length in range(1, max(lengths, default=0) + 1):
        alive = sum(lengths[index] > length for index in order)
        for place, index in enumerate(order):
            if lengths[index] == length:
                found[index] = beams[place]
        if not alive:
            break
        beams, scores = beams[:alive], scores[:alive]
        parents = parents[: alive * num_beams].astype(np.int32)
        last = beams[:, :, -1].ravel().astype(np.int32)
        own, chosen, scores = _best(head.next(parents, last, num_beams), scores, num_beams)
        requests = np.arange(alive)[:, None]
        beams = np.concatenate((beams[requests, own], chosen[:, :, None]), axis=2)
        parents = (requests * num_beams + own).ravel()
    return found


def _best(offers: Offers, scores: Scores, num_beams: int) -> tuple[Ids, Ids, Scores]:
    """[requests, beams] of the best offers: the beam that each continues, its token, its score."""
    shape = (len(scores), num_beams * num_beams)
    tokens, log_probs = (values.reshape(shape) for values in offers)
    totals = np.repeat(scores, num_beams, axis=1) + log_probs
    beams = np.broadcast_to(np.arange(shape[1]) // num_beams, shape)
    order = np.lexsort((tokens, beams, -totals), axis=1)[:, :num_beams]
    picked = (np.take_along_axis(values, order, 1) for values in (beams, tokens, totals))
    own, chosen, best = picked
    return own, chosen, best
