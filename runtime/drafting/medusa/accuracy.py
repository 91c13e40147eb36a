"""How often heads are right, by rank, and the tree that follows from it."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import MedusaTree
from llmctl.runtime.request import Sequence


class HeadAccuracy:
    """Counts, while requests run, at which rank each head had the token that then came.

    It is asked of every round, whatever tree that round drafts.
    """

    def __init__(self) -> None:
        self._hits: NDArray[np.int64] | None = None  # [heads, ranks]
        self._num_rounds = 0
        # By sequence id: (length when the heads ran, their tokens [heads, ranks]), oldest first.
        self._open: dict[int, deque[tuple[int, NDArray[np.int64]]]] = {}

    @property
    def num_rounds(self) -> int:
        """Rounds that were counted: all tokens that their heads drafted for are known."""
        return self._num_rounds

    @property
    def shares(self) -> NDArray[np.float64]:
        """[heads, ranks]: the share of rounds whose token that rank of the head was. Needs one."""
        assert self._hits is not None and self._num_rounds, "no round was counted"
        return self._hits / self._num_rounds

    def note(self, sequence: Sequence, tokens: NDArray[np.int64]) -> None:
        """Heads say `tokens` [heads, ranks] of what follows the sequence as it is."""
        waiting = self._open.setdefault(sequence.sequence_id, deque())
        waiting.append((len(sequence.tokens), tokens))
        if self._hits is None:
            self._hits = np.zeros(tokens.shape, np.int64)
        num_heads = len(tokens)
        while waiting and len(sequence.tokens) >= waiting[0][0] + num_heads:
            start, drafted = waiting.popleft()
            came = np.array(sequence.tokens[start : start + num_heads])
            self._hits += drafted == came[:, None]
            self._num_rounds += 1

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended; what its last heads said is never known."""
        self._open.pop(sequence.sequence_id, None)


def best_tree(shares: NDArray[np.float64], num_nodes: int) -> tuple[MedusaTree, float]:
    """(the tree of so many nodes whose paths are accepted most, tokens a round that it promises).

    A path is accepted with the product of its shares [heads, ranks], as if heads were right
    independently of each other. Nodes are taken by that product, so that any number of the first
    ones is the best tree of that size. Fewer nodes where all others are never right.
    """
    num_heads, num_ranks = shares.shape
    found: list[tuple[float, tuple[int, ...]]] = [
        (-float(share), (rank,)) for rank, share in enumerate(shares[0])
    ]
    heapify(found)
    paths: list[tuple[int, ...]] = []
    expected = 1.0
    while found and len(paths) < num_nodes:
        negative, path = heappop(found)
        if negative == 0:
            break
        paths.append(path)
        expected -= negative
        if len(path) < num_heads:
            for rank in range(num_ranks):
                heappush(found, (negative * float(shares[len(path), rank]), (*path, rank)))
    return MedusaTree(tuple(paths)), expected
