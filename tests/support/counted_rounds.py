"""Counts rounds on a device."""

from __future__ import annotations

from typing import Any

import pytest

from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner


class CountedRounds:
    """Device rounds as they are enqueued: how many, and how many while one was still unread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = self.ahead = self.drafts = 0
        enqueue = CudaRoundRunner.enqueue

        def count(runner: CudaRoundRunner, tables: Any, draft_len: int) -> None:
            self.ahead += len(runner._in_flight) > 0
            enqueue(runner, tables, draft_len)
            self.total += 1
            self.drafts += draft_len

        monkeypatch.setattr(CudaRoundRunner, "enqueue", count)
