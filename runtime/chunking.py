"""How much of which prompt one step takes, and the tuner that keeps steps short.

All chunk ends but a prompt's last are at block borders, so chunks are whole numbers of blocks,
save the first one after a partial-block hit, which completes that block.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Row

from llmctl.errors import BadConfig


class ContextChunkingPolicy(enum.Enum):
    """Who gets the step's context tokens when they do not suffice for everybody."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


def first_come_chunks(
    spans: Row[tuple[int, int]], budget: int, tokens_per_block: int | None
) -> list[int]:
    """Tokens for each (start, end) context span, in order, until the budget is used.

    The first span that does not fit whole is cut at a block border, or left for a later step
    where tokens_per_block is None (no chunking); whatever follows it waits.
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
    """Rounds of one block for each (start, end) span until the budget is used or nobody fits."""
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
    """The smallest chunk the span [start, end) can be given: to the next block border or its end.

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


class DynamicChunkTuner:
    """Finds the largest token budget whose steps stay within a time target.

    Give `observe` every step that had context work; set the scheduler's token budget to what it
    returns. A step over the target lowers the budget in proportion (at least one block, at most
    by half); a full step under it raises the budget in proportion or by one block. A budget that
    missed the target is tried again only after RETRY_STEPS full steps, so a steady machine stays
    on the best block multiple.
    """

    RETRY_STEPS = 64

    def __init__(self, max_step_s: float, tokens_per_block: int, max_num_tokens: int) -> None:
        if max_step_s <= 0:
            raise BadConfig(
                f"max_step_ms is {max_step_s * 1000:g}; it must be greater than 0",
                fix="leave --max-step-ms out for the largest chunks",
            )
        self.budget = max_num_tokens  # tokens per step
        self._max_step_s = max_step_s
        self._tokens_per_block = tokens_per_block
        self._max_num_tokens = max_num_tokens
        self._ceiling = max_num_tokens  # budgets above missed the target lately
        self._steps_to_retry = 0

    def observe(self, num_tokens: int, step_s: float) -> int:
        """Learn from a step of num_tokens tokens that took step_s seconds; the new budget."""
        block = self._tokens_per_block
        if step_s > self._max_step_s:
            wanted = int(num_tokens * max(0.5, self._max_step_s / step_s))
            lowered = min(_floor(self.budget - 1, block), _floor(wanted, block))
            self.budget = max(block, lowered) if self.budget > block else self.budget
            self._ceiling = self.budget
            self._steps_to_retry = self.RETRY_STEPS
        elif num_tokens > self.budget - block:
            self._steps_to_retry -= 1
            if self._steps_to_retry <= 0:
                self._ceiling = self._max_num_tokens
            wanted = int(num_tokens * min(2.0, self._max_step_s / max(step_s, 1e-9)))
            raised = max(self.budget + block, _floor(wanted, block))
            self.budget = max(self.budget, min(raised, self._ceiling))
        return self.budget


def _floor(num_tokens: int, tokens_per_block: int) -> int:
    return num_tokens // tokens_per_block * tokens_per_block
