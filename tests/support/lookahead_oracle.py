"""Lookahead decoding as a plain Jacobi iteration over positions, with a dictionary as its pool.

Nothing of llmctl's is used but the target's own answers. A level is an array over all positions of
the text to come; which of them a round reads follows from where its root is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Tokens = tuple[int, ...]
Target = Callable[[Tokens], int]  # its own token behind a text
NOTHING = -1


class Round(NamedTuple):
    """One step of a sequence."""

    num_committed: int  # tokens before it
    paths: set[Tokens]  # all that is drafted behind the root, prefixes too
    accepted: int


class Oracle:
    """The rounds of one sequence."""

    def __init__(
        self, target: Target, prompt: Tokens, sizes: tuple[int, int, int], end_id: int | None
    ) -> None:
        self.target, self.prompt, self.end_id = target, prompt, end_id
        self.width, self.ngram, self.guesses = sizes
        self.pool: dict[int, list[Tokens]] = {}

    def rounds(self, length: int) -> Iterator[Round]:
        """From the first token behind the prompt on, until the text has `length` tokens."""
        text = (*self.prompt, self.target(self.prompt))
        seeds = np.array(text[-64:])
        places = np.arange(length + 4 * (self.width + self.ngram))
        seeded = seeds[(places * 2654435761 // 2**16 % 2**16) % len(seeds)]
        levels = [seeded]
        num_read = 0
        while len(text) < length and text[-1] != self.end_id:
            root = len(text) - 1
            for start in range(num_read, len(text) - self.ngram + 1):
                self.add(text[start : start + self.ngram])
            num_read = max(num_read, len(text) - self.ngram + 1)
            columns = [self.column(levels, root, i) for i in range(self.width)]
            above = [text[: root + 1] + column for column in columns]
            drawn = [self.target(tokens) for tokens in above]
            guesses = list(self.pool.get(text[root], []))
            paths = {path[:n] for path in (*columns, *guesses) for n in range(1, 1 + len(path))}
            is_full = len(levels) == self.ngram - 1
            if is_full:
                for tokens, new in zip(above, drawn, strict=True):
                    self.add((*tokens, new)[-self.ngram :])
            level = seeded.copy()
            for i, token in enumerate(drawn):
                if token != self.end_id:
                    level[root + len(levels) + i] = token
            levels.append(level)
            if is_full:
                levels.pop(0)
            accepted = 0
            run: Tokens = (self.target(text),)
            while run in paths and run[-1] != self.end_id:
                accepted += 1
                run += (self.target(text + run),)
            if run in paths:  # the end of the text was drafted, too
                accepted += 1
            yield Round(len(text), paths, accepted)
            text += run
            # What lies beyond the window was never guessed.
            for depth, own in enumerate(levels):
                first = root + self.width + depth + is_full
                own[first:] = seeded[first:]

    def column(self, levels: list[np.ndarray], root: int, i: int) -> Tokens:
        """The tokens behind the root on the way to the end of a column."""
        first = levels[0][root + 1 : root + i + 1]
        down = [level[root + depth + i] for depth, level in enumerate(levels) if depth]
        return tuple(int(token) for token in (*first, *down))

    def add(self, ngram: Tokens) -> None:
        """It becomes the newest behind its first token."""
        known = self.pool.setdefault(ngram[0], [])
        known[:] = [*(other for other in known if other != ngram[1:]), ngram[1:]]
        known[:] = known[len(known) - min(len(known), self.guesses) :]
