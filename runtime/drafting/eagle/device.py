"""An EAGLE head in device rounds: chains of drafts, and behind acceptance the pairs of the round.

As in the host's steps (drafter.py) the head reads the pairs of a step when that is over. So a round
begins with the rows that the last step left, whoever led that, and ends with rows for the next. Of
a verification all rows are read, in their places: what follows the accepted ones is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from llmctl.builder.engine_format import (
    EAGLE_EXTEND,
    EAGLE_NEXT,
    EAGLE_STATE,
)
from llmctl.plugins.backends.cuda.queue import device_errors
from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.plugins.device_loop import pairs_kernel
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.drafter import DeviceChains, OnRank0
from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
from llmctl.runtime.drafting.eagle.head import EngineHead
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.upload import Drawing

LOGITS = "logits"


class DeviceEagle(DeviceChains, OnRank0):
    """See DeviceDrafter. host: what drafts in the steps between rounds, with the same head."""

    engines = ()
    max_requests: int | None = None
    falls_behind = False

    def __init__(self, target: CudaEngine, host: EagleDrafter, draft_len: int) -> None:
        assert isinstance(host.head, EngineHead), "of an engine"
        self.draft_len = draft_len
        self._target, self._head, self._rows = target, host.head, host.rows
        self._steps_of = {name: target.prepare_head(name) for name in (EAGLE_EXTEND, EAGLE_NEXT)}
        self.block_tables = [step.block_tables for step in self._steps_of.values()]
        self._features = host.head.features()
        self._places: dict[int, int] = {}  # in the rounds' order, by sequence id

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        self._steps = steps
        # As the head sees it: of n tokens there are n - 1 pairs.
        self._pairs = replace(steps.state, committed=torch.zeros_like(steps.state.committed))

    def prepare(self) -> None:
        """Nothing is read in advance."""

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    def begin(self, sequences: Items[Sequence]) -> None:
        """Put the rows that the head left in the order of the sequences."""
        self._places = {item.sequence_id: place for place, item in enumerate(sequences)}
        known, queue, state = self._rows.take(), self._target.queue, self._steps.state
        rows = torch.tensor([known[item.sequence_id] for item in sequences], dtype=torch.int64)
        outputs = {name: self._left(EAGLE_EXTEND, name) for name in (EAGLE_STATE, LOGITS)}
        with device_errors("writing the rows of a head"), queue.scope():
            index = queue.to_device(rows)
            for left in outputs.values():
                left[: len(rows)] = left[index]
            self._pairs.committed.copy_((state.committed - 1).clamp(min=0))
        self._head.go_on(outputs)

    def is_behind(self, sequence: Sequence) -> bool:
        return False

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """It never is behind."""

    def reads(self, draft_len: int) -> bool:
        return True

    def enqueue_drafts(self, shape: RoundShape) -> None:
        graph = EAGLE_EXTEND
        for index in range(shape.draft_len):
            if index:
                state = self._left(graph, EAGLE_STATE)[: shape.batch]
                self._target.write_head(EAGLE_NEXT, {EAGLE_STATE: state})
                self._steps.attend(EAGLE_NEXT, shape, 1)
                graph = EAGLE_NEXT
            self._draw(self._left(graph, LOGITS), shape, index)

    def enqueue_reading(self, shape: RoundShape) -> None:
        target, state, count = self._target, self._steps.state, shape.draft_len + 1
        verified, step = target.program.step, self._steps_of[EAGLE_EXTEND]
        described = state, self._pairs, verified, step, shape.batch, shape.draft_len
        self._steps.launch(target, [pairs_kernel.read_pairs(*described)])
        for name, outputs in self._features.items():
            target.pass_rows(EAGLE_EXTEND, name, outputs, shape.batch * count)
        self._steps.attend(EAGLE_EXTEND, shape, count)

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        sequence.kv_lens[DRAFT_GROUP] = len(sequence.tokens) - 1
        self._rows.note(sequence, self._places[sequence.sequence_id])

    def _draw(self, logits: torch.Tensor, shape: RoundShape, index: int) -> None:
        """Draft `index` of each request, and the step of the pair that it makes, if more follow;
        with greedy drafts in one launch."""
        steps, target, step = self._steps, self._target, self._steps_of[EAGLE_NEXT]
        is_last = index == shape.draft_len - 1
        described = self._pairs, step, target.program.limits, shape.batch, index + 1
        if shape.drawing is Drawing.GREEDY and not is_last:
            drawn = bookkeeping.draw_next(logits, steps.scratch(target), *described)
            steps.launch(target, [drawn])
            return
        drafts, stride = steps.state.drafts, steps.state.max_draft_len
        place = {"first": index, "stride": stride, "offset": index}
        steps.draw(target, drafts, shape, shape.batch, logits=logits, **place)
        if not is_last:
            steps.launch(target, [bookkeeping.draft_next(*described)])

    def _left(self, graph: str, output: str) -> torch.Tensor:
        """Where a step of the head leaves an output, a row for each request."""
        return self._target.head_output(graph, output)
