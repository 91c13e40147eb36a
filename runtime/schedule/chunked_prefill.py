"""How many tokens of which prompt one step reads.

All chunks except a prompt's last end at block boundaries, so chunks are whole numbers of blocks,
except the first one after a partial-block hit, which completes that block.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Row


class ContextChunkingPolicy(enum.Enum):
    """How the step's context tokens are distributed if they do not suffice for all prompts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


def first_come_chunks(
    spans: Row[tuple[int, int]], budget: int, tokens_per_block: int | None
) -> list[int]:
    """Tokens for each (start, end) context span, in order, until the budget is used.

    The first span that does not fit completely is cut at a block boundary, or left for a later step
    if tokens_per_block is None (no chunking); all spans after it wait.
    """
    sizes = [0] * len(spans)
    for index, (start, end) in enumerate(spans):
        if end - start > budget:
            if tokens_per_block is not None:
                sizes[index] = max(0, _floor(start + budget, tokens_per_block) - start)
            break
        sizes[index] = end - start
        budget -= end - start
    return sizes


def equal_progress_chunks(
    spans: Row[tuple[int, int]], budget: int, tokens_per_block: int
) -> list[int]:
    """One block for each (start, end) span in turn, until the budget is used or no span fits."""
    sizes = [0] * len(spans)
    progress = True
    while progress:
        progress = False
        for index, (start, end) in enumerate(spans):
            piece = least_chunk(start + sizes[index], end, tokens_per_block)
            if 0 < piece <= budget:
                sizes[index] += piece
                budget -= piece
                progress = True
    return sizes


def least_chunk(start: int, end: int, tokens_per_block: int | None) -> int:
    """The smallest possible chunk of the span [start, end): to the next block boundary or its end.

    Without chunking (None), the whole span.
    """
    if tokens_per_block is None:
        return end - start
    return min(end, _floor(start + tokens_per_block, tokens_per_block)) - start


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


def _floor(num_tokens: int, tokens_per_block: int) -> int:
    return num_tokens // tokens_per_block * tokens_per_block
