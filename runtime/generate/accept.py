"""Which drafts are accepted. Pure functions: drafts, probabilities and randomness are arguments.

Acceptance by tokens: the target draws its own token at every row, and the path continues as long as
a draft equals it. Every emitted token is a plain draw from the target, so drafts cannot change the
output.

Acceptance by logits (Leviathan et al. 2023, arXiv:2211.17192): drafts were drawn from known
distributions; each is kept with probability min(1, p / q), and after a rejection the next token is
drawn from the normalised max(p - q, 0). The output has the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.drafting.drafts import ROOT, Drafts

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
