"""What drafting has gained and lost, in seconds, and what it may still risk.

The gain of a step with drafts is the time that its tokens would have taken without drafts, minus
its own time. Because acceptance and costs are estimates, two accounts keep speculation from being
slower than plain decoding, even if the estimates are wrong:

- `credit` earns ALLOWANCE of every plain step and the gains of steps with drafts. Starting to
  draft, or trying whether it would be faster, needs credit. So the total loss from trying is
  limited to that fraction plus the first START plain steps' worth.
- `lead` is what drafting has gained since it began, at most LEAD_LIMIT plain steps. Below minus
  LEAD_LIMIT drafting stops, whatever the estimates say.
"""

from __future__ import annotations

ALLOWANCE = 0.01
START, LEAD_LIMIT, MAX_CREDIT = 1.5, 3.0, 30.0  # plain steps


class DraftBudget:
    """Accounts in seconds, compared with the time of a plain step of the current batch."""

    def __init__(self) -> None:
        self.credit = 0.0
        self.lead = 0.0
        self._is_open = False

    def open(self, plain_s: float) -> None:
        """Called once, when the time of a plain step is known: the initial credit."""
        if not self._is_open:
            self._is_open = True
            self.credit = START * plain_s

    def begin(self) -> None:
        """Drafting begins."""
        self.lead = 0.0

    def promised(self, gain: float, steps: int, plain_s: float) -> float:
        """Credit plus the expected gain of so many steps that are `gain` times as fast as plain
        ones."""
        return self.credit + min(steps * (gain - 1), MAX_CREDIT) * plain_s

    def note_plain(self, plain_s: float) -> None:
        """A step without drafts."""
        self._add(ALLOWANCE * plain_s, plain_s)

    def note_drafts(self, gain_s: float, plain_s: float, *, is_usual: bool) -> None:
        """A step with drafts. Unusual, one-time costs are paid from the credit alone."""
        self._add(gain_s, plain_s)
        if is_usual:
            self.lead = min(self.lead + gain_s, LEAD_LIMIT * plain_s)

    def _add(self, seconds: float, plain_s: float) -> None:
        if self._is_open:
            self.credit = min(self.credit + seconds, MAX_CREDIT * plain_s)
