"""The end of a step for one sequence: accepted drafts become tokens, and lengths are updated."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from llmctl.runtime.generate.stop import first_stop
from llmctl.runtime.request import Sequence


class Commit(NamedTuple):
    """What one slice added to its sequence. Context chunks before the last add nothing."""

    sequence: Sequence
    num_tokens: int  # new committed tokens
    num_drafts: int = 0
    accepted: int = 0  # accepted drafts
    # For a tree: (from, to) cache positions of accepted drafts that are not at the positions of
    # their tokens, in an order in which they may be copied one after another.
    moves: tuple[tuple[int, int], ...] = ()
    depth: int | None = None  # most drafts that could have been kept; None: all, a chain's
    # drafts that the step had rows for, and took the time of, although there were fewer; None:
    # `num_drafts`
    num_asked: int | None = None

    @property
    def num_rows(self) -> int:
        """Drafts that the step took the time of."""
        return self.num_drafts if self.num_asked is None else self.num_asked


def commit(sequence: Sequence, run: list[int], path: Items[int], num_drafts: int) -> Commit:
    """Append `run`, cut at the first stop: the tokens of the accepted drafts, then the target's
    own.

    path: indices of the accepted drafts among the `num_drafts` of the step. Draft i was computed at
    cache position len(tokens) + i. Sets tokens, kv_len and finish_reason.
    """
    tokens = sequence.tokens
    committed, accepted = len(tokens), len(path)
    num_kept, sequence.finish_reason = first_stop(sequence, run)
    del run[num_kept:]
    tokens += run
    valid = sequence.kv_lens[0] = min(committed + accepted, len(tokens) - 1)
    moves: tuple[tuple[int, int], ...] = ()
    # else the accepted drafts are the first ones, in order
    if accepted and path[-1] != accepted - 1:
        places = zip(path, range(valid - committed), strict=False)
        moves = tuple((committed + i, committed + depth) for i, depth in places if i != depth)
    return Commit(sequence, num_kept, num_drafts, accepted, moves)
