"""The window in which the target guesses ahead, by Jacobi iteration.

    column           0    1    2   ...  W-1
    level 0          r   l01  l02  ...         r: the root, the last committed token, at position p
    level 1         l10  l11  l12  ...         level l, column i: a guess of the token at p + l + i
    ...
    level N-2

Each level was drawn behind the one above it, so a column is an n-gram in the making: behind the
last level the target draws its next token. All of this is one tree. Level 0 is a path, and each
column hangs from its first token.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.runtime.drafting.lookahead.pool import Ngram

NUM_SEEDS = 64  # tokens of the text that stand where nothing was guessed


class Window:
    """The levels of one sequence; the first N - 2 rounds fill them. Column 0 of level 0 is the root
    and not stored.

    Where a level has no token, or one that ends the text, it gets a seed: one of the text's last
    tokens when the window was made. A hash of the position chooses it, so that a run can be
    repeated.
    """

    __slots__ = ("_end_id", "_height", "levels", "position", "seeds", "width")

    def __init__(
        self, config: LookaheadDecodingConfig, tokens: Sequence[int], end_id: int | None
    ) -> None:
        """`tokens` of the sequence so far, the root last."""
        self.width, ngram_size, _ = config.sizes
        self.position = len(tokens) - 1  # of the root
        self._height = ngram_size - 1  # of a full window
        self._end_id = end_id
        self.seeds = list(tokens[-NUM_SEEDS:])
        self.levels = [[self._seed(self.position + column) for column in range(self.width)]]

    @property
    def is_full(self) -> bool:
        """Whether every column is an n-gram without its last token."""
        return len(self.levels) == self._height

    def ngrams(self, root: int, drawn: Sequence[int | None]) -> list[tuple[int, Ngram]]:
        """(the first token, those behind it) of each column of a full window whose last token was
        drawn."""
        return [
            (
                self.levels[0][column] if column else root,
                (*(level[column] for level in self.levels[1:]), token),
            )
            for column, token in enumerate(drawn)
            if token is not None
        ]

    def advance(self, drawn: Sequence[int | None], position: int) -> None:
        """What the target drew behind each column becomes a level; the root is now at `position`.
        None: the column had no room in the step."""
        last = self.position + len(self.levels)
        level = [
            self._seed(last + column) if token in (None, self._end_id) else token
            for column, token in enumerate(drawn)
        ]
        moved = position - self.position
        if self.is_full:
            del self.levels[0]  # and every other level becomes the one above it, a position later
            moved -= 1
        self.levels.append([token for token in level if token is not None])
        self._move(moved, position)

    def follow(self, position: int) -> None:
        """The root is now at `position`, and the steps until there had no window."""
        if position != self.position:
            self._move(position - self.position, position)

    def _move(self, columns: int, position: int) -> None:
        """Bring every token to the column of its position."""
        self.position = position
        kept = max(0, self.width - columns)
        for index, level in enumerate(self.levels):
            del level[:columns]
            first = position + index
            level += [self._seed(first + column) for column in range(kept, self.width)]

    def _seed(self, position: int) -> int:
        return self.seeds[(position * 2654435761 >> 16 & 0xFFFF) % len(self.seeds)]
