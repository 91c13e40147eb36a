"""Beams as a tree: where beams begin alike, what they have in common is verified once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmctl.runtime.drafting.drafts import ROOT, Drafts


def merge(beams: NDArray[np.int64], room: int) -> Drafts:
    """The tree of beams [beams, length], all of which follow the root: of tokens that follow the
    same tokens one is kept, that of the first beam. Beam after beam, until `room` are drafted.

    A chain is one to the engine too: its steps cost less than those of trees.
    """
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> draft
    for beam in beams.tolist():
        last = ROOT
        for token in beam:
            draft = known.get((last, token))
            if draft is None:
                if len(tokens) == room:
                    break
                draft = known[last, token] = len(tokens)
                tokens.append(token)
                parents.append(last)
            last = draft
    is_chain = parents == list(range(ROOT, len(parents) - 1))
    return Drafts(tokens, None if is_chain else parents)
