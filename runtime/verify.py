"""From the target's logits to committed tokens: draw, accept, cut at the first stop, commit."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmctl.plugins.sampling.philox import uniform
from llmctl.plugins.sampling.reference import (
    Logits,
    draw_from_probs,
    log_softmax_at,
    processed_probs,
)
from llmctl.plugins.sampling.spec import ACCEPT_STREAM
from llmctl.runtime.core import Batch, Sequence, Slice
from llmctl.runtime.sampler import Sampler
from llmctl.runtime.speculative.accept import accept_logits, accept_tokens
from llmctl.runtime.speculative.drafter import Proposal
from llmctl.runtime.stop import first_stop


@dataclass(frozen=True, slots=True)
class Commit:
    """What one slice added to its sequence. Context chunks before the last add nothing."""

    sequence: Sequence
    num_tokens: int  # new committed tokens
    num_drafts: int = 0
    accepted: int = 0  # drafts that the accept rule kept


class Verifier:
    """Applies the accept rules to a whole batch, row by row in packed order."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def commit(self, batch: Batch, proposals: Items[Proposal], logits: Logits) -> list[Commit]:
        """Extend every sequence of the batch by what its rows of `logits` [rows, vocab] say.

        One Commit per slice, in packed order. Updates tokens, log_probs, kv_len, finish_reason.
        """
        no_drafts = Proposal()
        pairs = [(item, no_drafts) for item in batch.context]
        pairs += zip(batch.generation, proposals, strict=True)
        plain = [self._sampler.is_plain(item.sequence) for item, _ in pairs]
        best = self._sampler.argmax(logits).tolist() if len(logits) and any(plain) else []
        commits = []
        row = 0
        for (item, proposal), is_plain in zip(pairs, plain, strict=True):
            if not item.needs_logits:
                item.sequence.kv_len = item.start + item.num_tokens
                commits.append(Commit(item.sequence, 0))
                continue
            end = row + 1 + len(proposal.token_ids)
            rows = logits[row:end]
            if is_plain:
                accepted, token = accept_tokens(proposal.token_ids, best[row:end].__getitem__)
            else:
                accepted, token = self._accept(item.sequence, proposal, rows)
            commits.append(self._extend(item, proposal, rows, accepted, token))
            row = end
        return commits

    def _accept(self, sequence: Sequence, proposal: Proposal, rows: Logits) -> tuple[int, int]:
        if proposal.probs is None:
            target_token = partial(self._draw_after, sequence, proposal.token_ids, rows)
            return accept_tokens(proposal.token_ids, target_token)
        return self._accept_by_logits(sequence, proposal, rows)

    def _draw_after(self, sequence: Sequence, drafts: list[int], rows: Logits, index: int) -> int:
        return self._sampler.draw(rows[index], sequence, drafts[:index])

    def _accept_by_logits(
        self, sequence: Sequence, proposal: Proposal, rows: Logits
    ) -> tuple[int, int]:
        drafts = proposal.token_ids
        sampling_rows = [self._sampler.row(sequence, drafts[:i]) for i in range(len(rows))]
        target_probs = np.stack(
            [processed_probs(*pair) for pair in zip(rows, sampling_rows, strict=True)]
        )
        uniforms = [uniform(row.seed, row.position, ACCEPT_STREAM) for row in sampling_rows[:-1]]
        assert proposal.probs is not None
        accepted, probs = accept_logits(drafts, proposal.probs, target_probs, np.array(uniforms))
        return accepted, draw_from_probs(probs, sampling_rows[accepted])

    def _extend(
        self, item: Slice, proposal: Proposal, rows: Logits, accepted: int, token: int
    ) -> Commit:
        sequence = item.sequence
        run = [*proposal.token_ids[:accepted], token]
        num_kept, sequence.finish_reason = first_stop(sequence, run)
        del run[num_kept:]
        if sequence.request.output_config.return_log_probs:
            sequence.log_probs += log_softmax_at(rows[:num_kept], run)
        sequence.tokens += run
        valid = item.start + item.num_tokens + accepted
        sequence.kv_len = min(valid, len(sequence.tokens) - 1)
        return Commit(sequence, num_kept, len(proposal.token_ids), accepted)
