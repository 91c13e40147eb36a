"""Sampling in numpy: the truth that other backends are compared with.

Assumes finite float32 logits where it does not say otherwise. Scores are formed in float64, which
holds every float32 exactly, so the drawn token does not depend on vector width. Filters agree with
transformers' TopK, TopP and MinP warpers and its repetition penalty
(tests/plugins/ops/test_sampling.py); where logits tie at the top-p border, lower ids stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.ops.sampling.philox import Draw, uniform, uniforms
from llmctl.plugins.ops.sampling.spec import (
    NOISE_SPAN,
    SamplingParams,
    SamplingRow,
    has_penalties,
)

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Scores = NDArray[np.float64]
Candidates = tuple[Ids, Scores]  # ids ascending, and log-probabilities up to a constant

_LOWEST = np.finfo(np.float32).min  # banned ids lie below


def argmax_rows(logits: Logits) -> Ids:
    """The best id of each row [rows, vocab]; the lowest id on ties; -1 where a row holds NaN."""
    best: Ids = np.where(np.isnan(logits).any(axis=1), -1, logits.argmax(axis=1))
    return best


def sample_rows(logits: Logits, rows: Sequence[SamplingRow]) -> Ids:
    """One token per row of `logits` [len(rows), vocab], which is left as it was; -1 for NaN, and
    for +inf in a row that is drawn from: there is no distribution."""
    tokens = np.full(len(rows), -1, np.int64)
    drawn: list[int] = []
    candidates: list[Candidates] = []
    for index, row in enumerate(rows):
        if np.isnan(logits[index]).any():
            continue
        if np.isposinf(logits[index]).any() and not row.params.is_greedy:
            continue
        penalised = penalise(logits[index], row)
        if row.params.is_greedy:
            tokens[index] = penalised.argmax()
        else:
            drawn.append(index)
            candidates.append(survivors(penalised, row.params))
    if drawn:
        tokens[drawn] = draw_rows(candidates, [rows[index] for index in drawn])
    return tokens


def draw_rows(candidates: Sequence[Candidates], rows: Sequence[SamplingRow]) -> list[int]:
    """Sample from softmax(scores) over the ids of each row's candidates, with its keyed noise."""
    near = [_within_reach(*pair) for pair in candidates]
    draws = [
        Draw(row.seed, row.position, row.stream, ids)
        for (ids, _), row in zip(near, rows, strict=True)
    ]
    return [
        int(ids[(scores - np.log(-np.log(values))).argmax()])
        for (ids, scores), values in zip(near, uniforms(draws), strict=True)
    ]


def draw_from_probs(probs: Scores, row: SamplingRow) -> int:
    """Sample from a distribution [vocab] with the row's keyed noise."""
    ids = np.flatnonzero(probs)
    return draw_rows([(ids, np.log(probs[ids]))], [row])[0]


def processed_probs(logits: Logits, row: SamplingRow) -> Scores:
    """The distribution [vocab] that a row is drawn from; one-hot for a greedy row."""
    penalised = penalise(logits, row)
    probs = np.zeros(len(logits))
    if row.params.is_greedy:
        probs[penalised.argmax()] = 1.0
        return probs
    ids, scores = survivors(penalised, row.params)
    probs[ids] = _softmax(scores)
    return probs


def penalise(logits: Logits, row: SamplingRow) -> Logits:
    """Steps 1 and 2 of the spec: bans and penalties. Returns `logits` itself if there are none."""
    params = row.params
    penalised = bool(row.counts is not None and has_penalties(params))
    if not penalised and not row.banned:
        return logits
    out = logits.copy()
    out[[token for token in row.banned if token < len(out)]] = -np.inf
    if row.counts is not None and penalised:
        counts = row.counts[: len(out)]
        seen = np.flatnonzero(counts)
        values = out[seen]
        factor = np.float32(params.repetition_penalty)
        values = np.where(values < 0, values * factor, values / factor)
        values -= np.float32(params.presence_penalty)
        values -= np.float32(params.frequency_penalty) * counts[seen].astype(np.float32)
        out[seen] = values
    return out


def survivors(logits: Logits, params: SamplingParams) -> Candidates:
    """Steps 3 and 4: (ids ascending, scores) of the ids that may be drawn; softmax(scores) is
    their distribution. When everything is banned id 0 is left, as in the argmax of a greedy row."""
    border = np.float32(-np.inf)
    if params.top_k and params.top_k < len(logits):  # temperature does not change the order
        border = np.partition(logits, len(logits) - params.top_k)[len(logits) - params.top_k]
    ids = np.flatnonzero(logits >= max(border, _LOWEST))
    if not len(ids):
        return np.zeros(1, np.int64), np.zeros(1)
    wide = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: everything but the best is -inf
        scores = (wide - wide.max()) / params.temperature
    if params.top_p is not None and params.top_p < 1:
        ids, scores = _keep(_inside_top_p(scores, params.top_p), ids, scores)
    if params.min_p > 0:
        ids, scores = _keep(scores >= scores.max() + np.log(params.min_p), ids, scores)
    return ids, scores


def log_softmax_at(logits: Logits, tokens: Sequence[int]) -> list[float]:
    """log p(tokens[i]) under the raw row i of `logits` [len(tokens), vocab]."""
    wide = logits.astype(np.float64)
    best = wide.max(axis=1)
    total = np.log(np.exp(wide - best[:, None]).sum(axis=1))
    chosen = wide[np.arange(len(tokens)), list(tokens)]
    result: list[float] = (chosen - best - total).tolist()
    return result


def _inside_top_p(scores: Scores, top_p: float) -> NDArray[np.bool_]:
    """True for the ids left when the least likely ids holding at most 1 - top_p mass are cut."""
    probs = _softmax(scores)
    # Ids below this share hold less than 1 - top_p together: cut them without sorting them.
    candidates = np.flatnonzero(probs >= (1 - top_p) / len(probs))
    # Least likely first; among equals the higher id first, so lower ids stay.
    order = candidates[np.lexsort((-candidates, probs[candidates]))]
    cut_mass = probs.sum() - probs[order].sum()
    cut = cut_mass + np.cumsum(probs[order]) <= 1 - top_p
    cut[-1] = False  # the best id always stays
    inside = np.zeros(len(probs), np.bool_)
    inside[order[~cut]] = True
    return inside


def _softmax(scores: Scores) -> Scores:
    exponentials = np.exp(scores - scores.max())
    probs: Scores = exponentials / exponentials.sum()
    return probs


def _keep(mask: NDArray[np.bool_], ids: Ids, scores: Scores) -> Candidates:
    return ids[mask], scores[mask]


def _within_reach(ids: Ids, scores: Scores) -> Candidates:
    """The ids that can win; the others need no noise."""
    near = scores >= scores.max() - NOISE_SPAN
    return (ids, scores) if near.all() else _keep(near, ids, scores)


class ReferenceSampling:
    """The functions above as a `SamplingBackend`."""

    argmax = staticmethod(argmax_rows)
    sample_rows = staticmethod(sample_rows)
    draw_from_probs = staticmethod(draw_from_probs)
    log_softmax_at = staticmethod(log_softmax_at)

    def processed_probs(self, logits: Logits, rows: Sequence[SamplingRow]) -> Scores:
        """The distribution [len(rows), vocab] that each row is drawn from."""
        return np.stack([processed_probs(*pair) for pair in zip(logits, rows, strict=True)])

    def top_log_probs(self, logits: Logits, count: int) -> tuple[Ids, NDArray[np.float32]]:
        """The ids of the largest logits of each row, and their log-probabilities."""
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        largest = logits.max(axis=1, keepdims=True)
        sums = np.exp(logits - largest).sum(axis=1, keepdims=True)
        found = np.take_along_axis(logits, ids, axis=1) - largest - np.log(sums)
        return ids, found.astype(np.float32)

    def uniforms(self, rows: Sequence[SamplingRow]) -> Scores:
        """One uniform in (0, 1) per row, keyed by its (seed, position, stream)."""
        return np.array([uniform(row.seed, row.position, row.stream) for row in rows])
