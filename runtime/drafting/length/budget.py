"""What drafting has gained and lost, in seconds, and what it may still risk.

A step with drafts gains what its tokens would have taken without, less what it took. Because
acceptance and costs are estimates, two accounts keep speculation from losing to plain decoding
whatever they say:

- `credit` earns ALLOWANCE of every plain step and what steps with drafts gain. To start drafting,
  or to try whether it would pay, there must be credit for it. So all that is lost to trying is
  that share, and the first START plain steps' worth.
- `lead` is what drafting has gained since it began, up to LEASH plain steps. Below minus that it
  stops, whatever the estimates say.
"""

from __future__ import annotations

ALLOWANCE = 0.01
START, LEASH, MOST_CREDIT = 1.5, 3.0, 10.0  # plain steps


class DraftBudget:
    """Seconds, judged against a plain step's of the batch at hand."""

    def __init__(self) -> None:
        self.credit = 0.0
        self.lead = 0.0
        self._is_open = False

    def open(self, plain_s: float) -> None:
        """Once, when it is known what a plain step takes: the first credit."""
        if not self._is_open:
            self._is_open = True
            self.credit = START * plain_s

    def begin(self) -> None:
        """Drafting begins."""
        self.lead = 0.0

    def promised(self, gain: float, steps: int, plain_s: float) -> float:
        """Credit and what so many steps, `gain` times as fast as plain ones, promise to add."""
        return self.credit + min(steps * (gain - 1), MOST_CREDIT) * plain_s

    def note_plain(self, plain_s: float) -> None:
        """A step without drafts."""
        self._add(ALLOWANCE * plain_s, plain_s)

    def note_drafts(self, gain_s: float, plain_s: float, *, is_usual: bool) -> None:
        """A step with drafts. What is not usual is paid once, out of the credit alone."""
        self._add(gain_s, plain_s)
        if is_usual:
            self.lead = min(self.lead + gain_s, LEASH * plain_s)

    def _add(self, seconds: float, plain_s: float) -> None:
        if self._is_open:
            self.credit = min(self.credit + seconds, MOST_CREDIT * plain_s)
