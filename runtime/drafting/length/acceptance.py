"""How many drafts are accepted: of all sequences together, and of each."""

from __future__ import annotations

from collections.abc import Sequence as Items

from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.request import Sequence

FORGET = 0.9  # weight of the past, per step; more where few drafts were judged in it
LEAST_JUDGED = 32.0  # drafts that the shared share remembers at least
FORGET_OWN = 0.95
PRIOR = (2.8, 4.0)  # accepted drafts, of drafts judged, before the first: 0.7
SHARED_WEIGHT = 4.0  # judged drafts of all that count for a sequence besides its own


class Acceptance:
    """Accepted drafts, of those looked at: the ones behind the first rejection were not."""

    def __init__(self) -> None:
        self._shared = PRIOR
        self._own: dict[int, tuple[float, float]] = {}  # by sequence id

    @property
    def shared(self) -> float:
        """The share of drafts accepted lately, of those judged."""
        return self._shared[0] / self._shared[1]

    def of(self, sequence: Sequence) -> float:
        """The share to expect of a sequence's next draft; below 1."""
        accepted, judged = self._own.get(sequence.sequence_id, (0.0, 0.0))
        weight = SHARED_WEIGHT * self.shared
        return min(0.999, (accepted + weight) / (judged + SHARED_WEIGHT))

    def observe(self, generated: Items[Commit]) -> None:
        """Learn from a step."""
        drafted = [commit for commit in generated if commit.num_drafts]
        if not drafted:
            return
        accepted_all = judged_all = 0.0
        for commit in drafted:
            accepted = min(commit.accepted, commit.num_drafts)
            judged = min(accepted + 1, commit.num_drafts)
            accepted_all, judged_all = accepted_all + accepted, judged_all + judged
            before = self._own.get(commit.sequence.sequence_id, (0.0, 0.0))
            self._own[commit.sequence.sequence_id] = (
                FORGET_OWN * before[0] + accepted,
                FORGET_OWN * before[1] + judged,
            )
        forget = max(FORGET, 1 - judged_all / LEAST_JUDGED)
        self._shared = (
            forget * self._shared[0] + accepted_all,
            forget * self._shared[1] + judged_all,
        )
        if len(self._own) > 4 * len(generated) + 256:  # mostly sequences that have ended
            kept = {commit.sequence.sequence_id for commit in generated}
            self._own = {key: value for key, value in self._own.items() if key in kept}
