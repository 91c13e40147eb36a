"""Beams as a tree: where beams begin alike, what they have in common is verified once."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.redrafter.beams import ENDED, Beams


class Found(NamedTuple):
    """What a search found for a request. scores: the log-probability of the path to each draft, as
    the head has it."""

    drafts: Drafts
    scores: Items[float]


def merge(beams: NDArray[np.int64], room: int) -> Drafts:
    """The tree of beams [beams, length], all of which follow the root: of tokens that follow the
    same tokens one is kept, that of the first beam. Beam after beam, until `room` are drafted."""
    return merge_scored(Beams(beams, np.zeros(beams.shape, np.float32)), room).drafts


def merge_scored(beams: Beams, room: int) -> Found:
    """The same with the score of each draft."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> draft
    for beam, own in zip(beams.tokens.tolist(), beams.scores.tolist(), strict=True):
        last = ROOT
        for token, score in zip(beam, own, strict=True):
            if token == ENDED:
                break
            draft = known.get((last, token))
            if draft is None:
                if len(tokens) == room:
                    break
                draft = known[last, token] = len(tokens)
                tokens.append(token)
                parents.append(last)
                scores.append(score)
            last = draft
    return Found(Drafts.of(tokens, parents), scores)
