"""Which drafts stand. Pure functions: logits, probabilities and randomness are arguments.

Accept by tokens (rule R4): the target draws its own token at every row and the run goes on while
the draft says the same. Every emitted token is a plain draw from the target, so nothing about
the draft can change the output.

Accept by logits (rule R2): drafts were drawn from known distributions; each is kept with
probability min(1, p / q), and after a rejection the next token comes from the normalised
max(p - q, 0). The output has the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]


def accept_tokens(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> tuple[int, int]:
    """Return (accepted, next_token): how many drafts stand, and the token that follows them.

    draft_tokens [k]; target_tokens [k + 1], the i-th being the target's own draw after i drafts.
    """
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == target_tokens[accepted]:
        accepted += 1
    return accepted, target_tokens[accepted]


def accept_logits(
    draft_tokens: Sequence[int], draft_probs: Probs, target_probs: Probs, uniforms: Probs
) -> tuple[int, Probs]:
    """Return (accepted, next_probs): how many drafts stand, and what to draw the next token from.

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
