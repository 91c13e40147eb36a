"""How many drafts are accepted, over all sequences and for each."""

from __future__ import annotations

from collections.abc import Sequence as Items

from llmctl.runtime.generate.commit import Commit
from llmctl.runtime.request import Sequence

FORGET = 0.9  # weight of the past, per step; higher if few drafts were judged in the step
LEAST_JUDGED = 32.0  # the shared estimate covers at least so many drafts
FORGET_OWN = 0.95
PRIOR = (2.8, 4.0)  # initial counts: accepted drafts, judged drafts (0.7)
SHARED_WEIGHT = 4.0  # weight of the shared estimate in that of a sequence, in drafts


class Acceptance:
    """Accepted drafts out of those judged: drafts after the first rejection are not judged."""

    def __init__(self) -> None:
        self._shared = PRIOR
        self._own: dict[int, tuple[float, float]] = {}  # by sequence id

    @property
    def shared(self) -> float:
        """The fraction of recently judged drafts that was accepted, over all sequences."""
        return self._shared[0] / self._shared[1]

    def of(self, sequence: Sequence) -> float:
        """The acceptance probability to expect for a sequence's next draft; below 1."""
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
