"""What a drafter that knows how likely its drafts are is told of their cost, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import exp, inf
from typing import Protocol, runtime_checkable


@dataclass(slots=True)
class Confidence:
    """Shared by a drafter and what decides its lengths. Chances are logarithms.

    least_kept, least_continued: a draft that is less likely is left out, and none is sought behind
    one below the other. By default there is no limit.
    """

    least_kept: float = -inf
    least_continued: float = -inf
    can_branch: bool = False  # whether its drafts may be trees
    is_chain: bool = False  # whether they are to be chains nevertheless
    num_steps: int = 0  # of the drafter, for its last proposals
    expected: float = 0.0  # accepted drafts of those, as the drafter sees it
    num_first: int = 0  # drafts of all on the first paths of their trees

    def note(self, num_steps: int, chances: Items[Items[float]], num_first: int = 0) -> None:
        """Proposals: the chance that each draft of each sequence is accepted. num_first: of trees,
        the drafts that a chain would have had, as many as come first and follow each other."""
        self.num_steps, self.num_first = num_steps, num_first
        self.expected = sum(exp(chance) for own in chances for chance in own)


@runtime_checkable
class ConfidentDrafter(Protocol):
    """A Drafter that is one."""

    confidence: Confidence
