"""How long calibration will take, from its first batches."""

from __future__ import annotations

import time
from collections.abc import Callable

MEASURED = 4  # batches, after a first one that also pays for memory and kernels


class TimeEstimate:
    """Calls `tell` once, early, with the seconds that all batches of all layers will take.

    Where there are too few batches to learn from it says nothing.
    """

    def __init__(
        self,
        num_batches: int,
        tell: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_batches = num_batches
        self._tell = tell
        self._clock = clock
        self._done = 0
        self._start_s = 0.0

    def batch_done(self) -> None:
        """To be called after every batch."""
        self._done += 1
        if self._done == 1:
            self._start_s = self._clock()
        elif self._done == 1 + MEASURED:
            self._tell((self._clock() - self._start_s) / MEASURED * self._num_batches)
