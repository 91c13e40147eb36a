"""When the round after the one in flight is enqueued: as late as is safe.

A prompt that arrives waits for every round that is enqueued. So the next one is enqueued when the
one in flight is half over, and a prompt that arrives before that waits for the one in flight alone.
If the host proves to be late, because other processes use its cores, rounds are enqueued without
this delay for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

# At least so long before the end of a round the next one is enqueued. The host needs a tenth of it.
LEAST_AHEAD_S = 1.5e-3
LATE = 1.25  # times what a round takes on the device: then the host was late
HASTY_ROUNDS = 64  # that do not wait, after one that did and was late


class SpareTime:
    """Follows rounds by the host's clock (`now`, seconds) and what they took on the device."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._began = 0.0  # when the oldest round in flight began, as far as the host knows
        # What the last two rounds that were read took on the device. The shorter one counts: the
        # other may have had a graph captured in it.
        self._taken_s = (0.0, 0.0)
        self._has_waited = False  # since then
        self._num_hasty = 0  # rounds that are not to wait

    def note_begin(self) -> None:
        """A round was enqueued while none was in flight."""
        self._began = self._now()
        self._has_waited = False

    def note_end(self, round_s: float) -> None:
        """The oldest round in flight was read; it took so long on the device."""
        ended = self._now()
        self._num_hasty = max(0, self._num_hasty - 1)
        if self._has_waited and ended - self._began > LATE * round_s:
            self._num_hasty = HASTY_ROUNDS
        self._began, self._has_waited = ended, False
        self._taken_s = (self._taken_s[1], round_s)

    def note_wait(self) -> None:
        """The round after the one in flight is enqueued later than it could be."""
        self._has_waited = True

    @property
    def seconds(self) -> float:
        """For so long, if that is more than 0, the next round may still wait."""
        if self._num_hasty:
            return 0.0
        round_s = min(self._taken_s)
        return self._began + round_s - max(round_s / 2, LEAST_AHEAD_S) - self._now()
