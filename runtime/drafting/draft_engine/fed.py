"""The cache of a draft engine in device rounds, whatever it drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.feeding import cut, unread
from llmctl.runtime.engines.cuda_engine import LEAST_FED, CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps
from llmctl.runtime.rounds.verification import MOST_FED
from llmctl.runtime.step import pack


class FedDraftEngine:
    """What chains and trees have in common; see DeviceDrafter. The cache uses the target's block
    ids. A round begins with the last two tokens of each request: others must be there."""

    falls_behind = True

    def __init__(self, draft: CudaEngine, draft_len: int, most_tokens: int) -> None:
        """most_tokens: of a request, in a step of the draft engine."""
        self.draft_len = draft_len
        self.max_requests: int | None = draft.max_num_tokens // most_tokens
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
            unread(draft, sequence, end)
            for sequence, end in zip(sequences, ends, strict=True)
            if sequence.kv_lens[DRAFT_GROUP] < end
        ]
        for call in cut(spans, draft):
            step = pack(call, draft.tokens_per_block)
            np.minimum(step.token_ids, draft.vocab_size - 1, out=step.token_ids)  # as in drafting
            draft.feed(step)
            for span in call:
                span.sequence.kv_lens[DRAFT_GROUP] = span.end


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
