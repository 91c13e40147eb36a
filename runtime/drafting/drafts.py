"""What is proposed for one sequence in one step: a chain of tokens, or a tree."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROOT = -1  # the parent of whatever follows the last committed token


def is_chain(parents: Items[int]) -> bool:
    """Whether every token follows the one before."""
    return all(parent == index - 1 for index, parent in enumerate(parents))


@dataclass(slots=True)
class Drafts:
    """The drafted tokens of one generation slice; at most its draft_len, possibly none.

    tokens [T]. parents [T]: the index in `tokens` of each token's parent, always smaller than its
    own, or ROOT; siblings have distinct tokens. None means a chain: every token follows the one
    before. probs [T, target vocab] are the distributions that a chain was drawn from; None means
    acceptance by tokens. `num_forced` drafts of a chain are accepted whatever the target says; None
    except in benchmarks (runtime/generate/synthetic_acceptance.py).
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    probs: NDArray[np.float64] | None = None
    num_forced: int | None = None

    @classmethod
    def of(cls, tokens: list[int], parents: list[int]) -> Drafts:
        """Whatever has these parents. A chain is one to the engine too: its steps cost less than
        those of trees."""
        return cls(tokens, None if is_chain(parents) else parents)

    def __post_init__(self) -> None:
        if self.parents is None:
            return
        assert len(self.parents) == len(self.tokens), "a parent for every token"
        assert all(ROOT <= parent < i for i, parent in enumerate(self.parents)), "parents first"
        assert self.probs is None and self.num_forced is None, "these are about chains"

    @property
    def depth(self) -> int:
        """Tokens of the longest path: the most drafts that can be accepted."""
        if self.parents is None:
            return len(self.tokens)
        depths = {ROOT: 0}
        for index, parent in enumerate(self.parents):
            depths[index] = depths[parent] + 1
        return max(depths.values())

    @property
    def num_first(self) -> int:
        """Tokens of the path that comes first: as many as follow the one before."""
        if self.parents is None:
            return len(self.tokens)
        beside = (i for i, parent in enumerate(self.parents) if parent != i - 1)
        return next(beside, len(self.parents))

    def path_to(self, index: int) -> Items[int]:
        """Indices of the tokens from the root's child down to `index`; none for ROOT."""
        if self.parents is None:
            return range(index + 1)
        path = []
        while index != ROOT:
            path.append(index)
            index = self.parents[index]
        return path[::-1]

    def tokens_to(self, index: int) -> list[int]:
        """The tokens of that path."""
        if self.parents is None:
            return self.tokens[: index + 1]
        return [self.tokens[node] for node in self.path_to(index)]
