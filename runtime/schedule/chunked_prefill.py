"""How many tokens of each prompt a step computes.

All chunks except a prompt's last end at block boundaries, so chunks are whole numbers of blocks,
except the first one after a partial-block hit, which completes that block. Tokens whose attention
has FP8 products are read in whole groups (plugins/ops/paged_attention/fp8_context.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Row
from typing import NamedTuple

from llmctl.runtime.request import Sequence


class ContextChunkingPolicy(enum.Enum):
    """How the step's context tokens are distributed if they do not suffice for all prompts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class Unread(NamedTuple):
    """Tokens [start, end) of a sequence that are not in the cache. Those before `context_end` are
    read in whole groups, and `start` is a multiple of a group if it lies among them."""

    start: int
    end: int
    context_end: int = 0


def unread(sequence: Sequence, start: int | None = None) -> Unread:
    """What is left to read of a sequence, or what is left from `start` on."""
    first = sequence.kv_lens[0] if start is None else start
    return Unread(first, len(sequence.tokens), sequence.context_end)


class Cuts(NamedTuple):
    """Where a chunk that is not its prompt's last may end: at multiples of a block, and before
    `context_end` at multiples of a group, which is whole blocks."""

    block: int
    group: int = 0

    @property
    def widest(self) -> int:
        """The most tokens of a smallest chunk."""
        return max(self.block, self.group)

    def last(self, span: Unread, limit: int) -> int:
        """The last such place that is not behind `limit`."""
        cut = limit // self.block * self.block
        return cut if cut >= span.context_end else limit // self.group * self.group

    def first(self, span: Unread) -> int:
        """The first such place behind the span's start, if the span is longer."""
        unit = self.group if span.start < span.context_end else self.block
        return (span.start + unit) // unit * unit


def first_come_chunks(spans: Row[Unread], budget: int, cuts: Cuts | None) -> list[int]:
    """Tokens for each context span, in order, until the budget is used.

    The first span that does not fit completely is cut, or left for a later step if there are no
    cuts (no chunking); all spans after it wait.
    """
    sizes = [0] * len(spans)
    for index, span in enumerate(spans):
        length = span.end - span.start
        if length > budget:
            if cuts is not None:
                sizes[index] = max(0, cuts.last(span, span.start + budget) - span.start)
            break
        sizes[index] = length
        budget -= length
    return sizes


def equal_progress_chunks(spans: Row[Unread], budget: int, cuts: Cuts) -> list[int]:
    """One smallest chunk for each span in turn, until the budget is used or no span fits."""
    sizes = [0] * len(spans)
    progress = True
    while progress:
        progress = False
        for index, span in enumerate(spans):
            piece = least_chunk(span._replace(start=span.start + sizes[index]), cuts)
            if 0 < piece <= budget:
                sizes[index] += piece
                budget -= piece
                progress = True
    return sizes


def least_chunk(span: Unread, cuts: Cuts | None) -> int:
    """The smallest possible chunk of the span: to the next cut or its end. Without chunking (None),
    the whole span."""
    if cuts is None:
        return span.end - span.start
    return min(span.end, cuts.first(span)) - span.start


def fair_shares(wants: Row[int], budget: int) -> list[int]:
    """Cut `wants` to a common cap so that their sum fits; what is left goes one each, in order."""
    cap = max(wants, default=0)
    while cap > 0 and sum(min(want, cap) for want in wants) > budget:
        cap -= 1
    shares = [min(want, cap) for want in wants]
    left = max(0, budget - sum(shares))
    for index, want in enumerate(wants):
        if left and want > cap:
            shares[index] += 1
            left -= 1
    return shares
