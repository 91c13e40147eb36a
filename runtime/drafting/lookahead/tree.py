"""Guesses and window as one tree, in which what begins alike is verified once.

Any path of it may be accepted: also one through the window, whose tokens are guesses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.lookahead.pool import Ngram
from llmctl.runtime.drafting.lookahead.window import Window


class Planned(NamedTuple):
    """The drafts of a round, and behind which of them each column's next token is drawn: ROOT is
    the root, None a column for which there was no room."""

    drafts: Drafts
    ends: list[int | None]


class _Tree:
    """Grows up to `room` drafts."""

    def __init__(self, room: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._room = room
        self._found: dict[tuple[int, int], int] = {}

    def grow(self, parent: int | None, token: int) -> int | None:
        """The draft of this token behind a parent; None where there is no room for it, or was none
        for the parent."""
        if parent is None:
            return None
        node = self._found.get((parent, token))
        if node is None and len(self.tokens) < self._room:
            node = self._found[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node


def plan(window: Window, guesses: Sequence[Ngram], room: int) -> Planned:
    """The newest guess comes first, then the window column by column: where there is room for
    fewer drafts, the last ones are left out."""
    tree = _Tree(room)
    for guess in reversed(guesses):
        node: int | None = ROOT
        for token in guess:
            node = tree.grow(node, token)
    first: int | None = ROOT
    ends: list[int | None] = []
    for column in range(window.width):
        if column:
            first = tree.grow(first, window.levels[0][column])
        node = first
        for level in window.levels[1:]:
            node = tree.grow(node, level[column])
        ends.append(node)
    return Planned(Drafts.of(tree.tokens, tree.parents), ends)
