"""What drafters of device rounds share that begin with a hidden row of the round before."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from llmctl.plugins.backends.cuda.queue import device_errors
from llmctl.runtime.drafting.drafter import NeverReads, OnEveryRank
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps


class DeviceRows(NeverReads, OnEveryRank):
    """See FollowedDrafter. Acceptance on the device says which hidden row a head reads next, where
    its graph finds it; a round that follows a step of the host's gets the rows from `rows`."""

    engines = ()
    max_requests: int | None = None
    falls_behind = False

    def __init__(self, target: CudaEngine, rows: HiddenRows) -> None:
        self._target = target
        self._rows = rows
        self._sequences: list[Sequence] = []

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        self._steps = steps

    def prepare(self) -> None:
        """Nothing is read in advance."""

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    def begin(self, sequences: Items[Sequence]) -> None:
        self._sequences = list(sequences)
        trees, queue = self._steps.trees, self._target.queue
        assert trees is not None
        known = self._rows.take()  # those of sequences that are left out are overwritten
        rows = np.zeros(self._steps.state.max_batch_size, np.int32)
        rows[: len(sequences)] = [known[sequence.sequence_id] for sequence in sequences]
        with device_errors("writing the rows of heads"), queue.scope():
            trees.rows[: len(rows)].copy_(queue.to_device(torch.from_numpy(rows)))

    def start_of(self, sequence: Sequence) -> int:
        """The hidden row."""
        return self._rows.row_of(sequence)

    def note_start(self, sequence: Sequence, start: Any) -> None:
        self._rows.note(sequence, start)

    def end(self, nodes: Items[int], draft_len: int) -> None:
        for index, (sequence, node) in enumerate(zip(self._sequences, nodes, strict=True)):
            self._rows.note(sequence, index * (draft_len + 1) + node)

    def is_behind(self, sequence: Sequence) -> bool:
        return False

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """There is no cache."""

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        """There is no cache."""
