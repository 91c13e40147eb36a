"""Beam search with a recurrent head, many requests at once, each of a length of its own.

Scores are sums of log-probabilities in float32. Every beam offers its likeliest tokens, as many as
there are beams, and the best of all offers are the next beams: by score, and where scores are equal
by beam and then by token, the smaller first. Lengths are not weighed: a token that ends a text is
one like any other. A beam ends at its length, or where `Bounds` says that going on is not worth it.

This is the search step by step, of whatever runs a head. The CPU library has it in one call
(plugins/backends/cpu/beam_search.cpp), device rounds as kernels (device.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Offers = tuple[Ids, Scores]  # [rows, count] each: tokens, the likeliest first, and their log-probs

ENDED = -1  # in the place of tokens behind the end of a beam


class Head(Protocol):
    """What runs the steps of a recurrent head; `EngineHead` is one."""

    def first(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """Behind `tokens` [N], each of which was drawn from a row of the target's last step."""

    def next(self, rows: NDArray[np.int32], tokens: NDArray[np.int32], count: int) -> Offers:
        """Behind `tokens` [N], each of which continues a row of the step before."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Scores of what is worth its cost: a draft below `least_kept` is left out, a beam that is
    below `least_continued` ends there. By default every beam has its whole length."""

    least_kept: float = -np.inf
    least_continued: float = -np.inf


UNBOUNDED = Bounds()


class Beams(NamedTuple):
    """Beams of a request, the best first, without the root: [num_beams, length] each. A beam that
    has ended has the token ENDED from there on, and one that there is not the score -inf."""

    tokens: Ids
    scores: Scores  # of the path up to each token


class _Best(NamedTuple):
    """[requests, beams] each: the beam that every next one continues, its token, its score."""

    own: Ids
    tokens: Ids
    scores: Scores


def search(
    head: Head,
    rows: Items[int],
    roots: Items[int],
    lengths: Items[int],
    num_beams: int,
    bounds: Bounds = UNBOUNDED,
) -> list[Beams]:
    """The beams of every request.

    rows: of the target's last step, that the roots were drawn from. lengths: at least 1.
    """
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])  # those that end first last
    as_int32 = [np.array([values[i] for i in order], np.int32) for values in (rows, roots)]
    none = np.zeros((len(rows), 1), np.float32)
    best = _best(head.first(as_int32[0], as_int32[1], num_beams), none, none > 0, num_beams, bounds)
    tokens, scores = best.tokens[:, :, None], best.scores[:, :, None]
    found = [Beams(np.empty(0, np.int64), np.empty(0, np.float32))] * len(rows)
    parents = np.repeat(np.arange(len(rows)), num_beams)  # rows of the step before
    for length in range(1, max(lengths, default=0) + 1):
        alive = sum(lengths[index] > length for index in order)
        for place, index in enumerate(order):
            if lengths[index] == length:
                found[index] = Beams(tokens[place], scores[place])
        tokens, scores = tokens[:alive], scores[:alive]
        last = tokens[:, :, -1]
        has_ended = (last == ENDED) | (scores[:, :, -1] < np.float32(bounds.least_continued))
        if has_ended.all():
            for place, index in enumerate(order[:alive]):
                found[index] = Beams(tokens[place], scores[place])
            break
        parents = parents[: alive * num_beams].astype(np.int32)
        offers = head.next(parents, np.maximum(last, 0).ravel().astype(np.int32), num_beams)
        best = _best(offers, scores[:, :, -1], has_ended, num_beams, bounds)
        requests = np.arange(alive)[:, None]
        tokens = np.concatenate((tokens[requests, best.own], best.tokens[:, :, None]), axis=2)
        scores = np.concatenate((scores[requests, best.own], best.scores[:, :, None]), axis=2)
        parents = (requests * num_beams + best.own).ravel()
    return found


def _best(
    offers: Offers, scores: Scores, has_ended: NDArray[np.bool_], num_beams: int, bounds: Bounds
) -> _Best:
    """The best offers of beams [requests, beams]. A beam that has ended, or none of whose offers is
    kept, offers to stay as it is; what is then missing of so many beams are some of score -inf."""
    shape = (len(scores), scores.shape[1] * num_beams)
    offered, log_probs = offers[0].reshape(shape), offers[1].reshape(shape)
    totals = np.repeat(scores, num_beams, axis=1) + log_probs
    totals = np.where(np.isnan(totals), np.float32(-np.inf), totals)
    is_kept = (totals >= np.float32(bounds.least_kept)) & ~np.repeat(has_ended, num_beams, axis=1)
    stays = ~is_kept.reshape(*scores.shape, num_beams).any(axis=2)
    tokens, totals = np.where(is_kept, offered, ENDED), np.where(is_kept, totals, -np.inf)
    staying = np.repeat(stays, num_beams, axis=1)
    staying[:, np.arange(shape[1]) % num_beams > 0] = False  # once
    totals[staying] = scores[stays]
    beams = np.broadcast_to(np.arange(shape[1]) // num_beams, shape)
    keys = (tokens, beams, -totals, ~(is_kept | staying))
    order = np.lexsort(keys, axis=1)[:, :num_beams]
    own, chosen, best = (np.take_along_axis(v, order, 1) for v in (beams, tokens, totals))
    return _Best(own, chosen, best.astype(np.float32))
