"""Which drafts are accepted. Pure functions: drafts, probabilities and randomness are arguments.

Acceptance by tokens: the target draws its own token at every row, and the path continues as long as
a draft equals it. Every emitted token is a plain draw from the target, so drafts cannot change the
output.

Acceptance by logits (Leviathan et al. 2023, arXiv:2211.17192): drafts were drawn from known
distributions; each is kept with probability min(1, p / q), and after a rejection the next token is
drawn from the normalised max(p - q, 0). The output has the target's distribution.

Typical acceptance (Cai et al. 2024, arXiv:2401.10774): whatever a draft was drawn from, it is kept
where the target finds it not too unlikely. The output has another distribution than the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.drafting.drafts import ROOT, Drafts

_IN_LOGARITHM = 1e-5  # added to probabilities in the entropy, as the published code does

Probs = NDArray[np.float64]


def accept_tokens(drafts: Drafts, target_tokens: Sequence[int]) -> tuple[Sequence[int], int]:
    """Return (path, next_token): the indices of the drafts that are accepted, from the root down,
    and the token that follows them.

    target_tokens [T + 1]: the target's own draw after the last committed token, then after each
    draft.
    """
    tokens = drafts.tokens
    if drafts.parents is None:
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == target_tokens[accepted]:
            accepted += 1
        return range(accepted), target_tokens[accepted]
    path: list[int] = []
    last = ROOT
    for index, parent in enumerate(drafts.parents):  # parents come before their children
        if parent == last and tokens[index] == target_tokens[1 + last]:
            path.append(index)
            last = index
    return path, target_tokens[1 + last]


def accept_logits(
    draft_tokens: Sequence[int], draft_probs: Probs, target_probs: Probs, uniforms: Probs
) -> tuple[int, Probs]:
    """Return (accepted, next_probs): accepted drafts, and what to draw the next token from.

    draft_tokens [k]; draft_probs [k, vocab]; target_probs [k + 1, vocab]; uniforms [k] in [0, 1).
    """
    rows = np.arange(len(draft_tokens))
    columns = np.asarray(draft_tokens, np.int64)
    draft, target = draft_probs[rows, columns], target_probs[rows, columns]
    # Strict "<": with "<=" a uniform of exactly 0 would keep a token the target never emits.
    accepted = int(np.cumprod(uniforms * draft < target).sum())
    if accepted == len(draft_tokens):
        return accepted, target_probs[accepted]
    residual = np.maximum(target_probs[accepted] - draft_probs[accepted], 0)
    total = residual.sum()
    if total == 0:  # the two agree up to rounding, and rounding alone rejected
        return accepted, target_probs[accepted]
    return accepted, residual / total


def accept_typical(
    drafts: Drafts, target_probs: Probs, threshold: float, alpha: float
) -> Sequence[int]:
    """The indices of the drafts that are accepted, from the root down: the longest path of drafts
    with p > min(threshold, alpha * exp(-entropy of their row)); of several the likeliest, then the
    first.

    target_probs [T + 1, vocab]: after the last committed token, then after each draft.
    """

    @cache  # of rows that the path reaches alone: a row has as many numbers as the vocabulary
    def limit(row: int) -> float:
        probs = target_probs[row]
        entropy = -(probs * np.log(probs + _IN_LOGARITHM)).sum()
        return min(threshold, alpha * float(np.exp(-entropy)))

    best = (0, 0.0, ROOT)  # depth, log-likelihood, last draft of the path
    ends = {ROOT: best}  # of the accepted drafts
    parents = drafts.parents
    for index, token in enumerate(drafts.tokens):  # parents come before their children
        parent = index - 1 if parents is None else parents[index]
        if parent not in ends:
            continue
        p = float(target_probs[1 + parent, token])
        if not p > limit(1 + parent):  # also NaN
            continue
        depth, likelihood, _ = ends[parent]
        ends[index] = (depth + 1, likelihood + float(np.log(p)), index)
        if ends[index][:2] > best[:2]:
            best = ends[index]
    return drafts.path_to(best[2])
