"""A draft engine in device rounds: each step reads the token drawn by the previous step."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.feeding import cut
from llmctl.runtime.drafting.drafter import DeviceChains
from llmctl.runtime.engines.cuda_engine import LEAST_FED, CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.upload import Drawing
from llmctl.runtime.rounds.verification import MOST_FED
from llmctl.runtime.step import Span, pack


class DeviceDraftEngine(DeviceChains):
    """See DeviceDrafter. Its cache uses the target's block ids."""

    falls_behind = True

    def __init__(self, draft: CudaEngine, draft_len: int) -> None:
        self.draft_len = draft_len
        self.max_requests: int | None = draft.max_num_tokens // MOST_FED
        self._draft = draft

    @property
    def engines(self) -> tuple[CudaEngine, ...]:
        """The draft engine."""
        return (self._draft,)

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        self._steps = steps

    def prepare(self) -> None:
        draft, power = self._draft, LEAST_FED
        while power <= draft.max_num_tokens:
            for num_tokens in (3 * power // 4, power):
                draft.feed(_unwritten(num_tokens, draft.max_seq_len, draft.tokens_per_block))
            power *= 2

    def is_behind(self, sequence: Sequence) -> bool:
        return sequence.kv_lens[DRAFT_GROUP] < len(sequence.tokens) - MOST_FED

    def catch_up(self, sequences: Items[Sequence]) -> None:
        draft = self._draft
        ends = [len(sequence.tokens) - MOST_FED for sequence in sequences]
        spans = [
            Span(sequence, sequence.kv_lens[DRAFT_GROUP], end, needs_logits=False)
            for sequence, end in zip(sequences, ends, strict=True)
            if sequence.kv_lens[DRAFT_GROUP] < end
        ]
        for call in cut(spans, draft.max_num_tokens, draft.max_batch_size):
            step = pack(call, draft.tokens_per_block)
            np.minimum(step.token_ids, draft.vocab_size - 1, out=step.token_ids)  # as in drafting
            draft.feed(step)
            for span in call:
                span.sequence.kv_lens[DRAFT_GROUP] = span.end

    def enqueue_drafts(self, shape: RoundShape) -> None:
        steps, draft = self._steps, self._draft
        batch, last = shape.batch, shape.draft_len - 1
        # then the drawing kernel also prepares the step
        is_greedy = shape.drawing is Drawing.GREEDY
        for index in range(shape.draft_len):
            self._feed(shape, index)
            steps.forward(draft, shape, MOST_FED if index == 0 else 1, batch)
            if is_greedy and index < last:
                continue
            drafts, stride = steps.state.drafts, steps.state.max_draft_len
            steps.draw(draft, drafts, shape, batch, first=index, stride=stride, offset=index)

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        # The last draft was never fed to the draft engine.
        valid = committed + min(accepted, draft_len - 1)
        sequence.kv_lens[DRAFT_GROUP] = min(valid, len(sequence.tokens) - 1)

    def _feed(self, shape: RoundShape, index: int) -> None:
        """Prepare the draft's step `index`; with greedy drafts, also draw the token that it
        reads."""
        steps, program = self._steps, self._draft.program
        described = steps.state, program.step, program.limits, shape.batch
        if index == 0:
            steps.launch(steps.target, [bookkeeping.draft_first(*described)])
        elif shape.drawing is Drawing.GREEDY:
            scratch = steps.scratch(self._draft)
            drawn = bookkeeping.draw_next(self._draft.logits, scratch, *described, index)
            steps.launch(self._draft, [drawn])
        else:
            steps.launch(steps.target, [bookkeeping.draft_next(*described, index)])


def _unwritten(num_tokens: int, max_seq_len: int, tokens_per_block: int) -> StepInputs:
    """A prompt step that writes nothing to the cache."""
    lengths = np.full(-(-num_tokens // max_seq_len), max_seq_len, np.int32)
    lengths[-1] -= lengths.sum() - num_tokens
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return StepInputs(
        token_ids=np.zeros_like(positions),
        position_ids=positions,
        cu_q=np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
        kv_len=lengths,
        block_tables=np.zeros((len(lengths), -(-max_seq_len // tokens_per_block)), np.int32),
        slot_mapping=np.full_like(positions, -1),
        logit_rows=np.zeros(0, np.int32),
    )
