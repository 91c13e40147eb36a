"""Results on their way out: in the order of the prompts, each as soon as it can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from llmctl.cli.run.generate import Row
from llmctl.errors import DeviceFailure, ExecutorClosed, RankFailure

Taker = Callable[[Row], None]


class Results:
    """Hands each row that has ended to every taker, when those before it have been handed on.
    Then its tokens are forgotten, unless `keeps_tokens`: figures are left for the statistics."""

    def __init__(self, rows: Sequence[Row], *takers: Taker, keeps_tokens: bool) -> None:
        self._left = deque(rows)
        self._takers = takers
        self._keeps_tokens = keeps_tokens

    def hand_on(self) -> None:
        """Rows that have ended, up to the first that has not."""
        while self._left and self._left[0].has_ended:
            row = self._left.popleft()
            for take in self._takers:
                take(row)
            if not self._keeps_tokens:
                row.forget_tokens()


def is_lost(row: Row) -> bool:
    """Whether it was not this request that failed, but what every request runs on."""
    return isinstance(row.error, RankFailure | DeviceFailure | ExecutorClosed)
