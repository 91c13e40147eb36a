"""From the target's logits to committed tokens: draw, accept, cut at the first stop, commit."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llmctl.plugins.ops.sampling.spec import ACCEPT_STREAM, Logits
from llmctl.runtime.drafting.drafter import Proposal
from llmctl.runtime.generate.accept import accept_logits, accept_tokens
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.generate.stop import first_stop
from llmctl.runtime.request import Batch, Sequence, Slice


class Commit(NamedTuple):
    """What one slice added to its sequence. Context chunks before the last add nothing."""

    sequence: Sequence
    num_tokens: int  # new committed tokens
    num_drafts: int = 0
    accepted: int = 0  # drafts that the accept rule kept


class Owner(NamedTuple):
    """A slice, its drafts, and the rows of logits [first, end) that are its own."""

    item: Slice
    proposal: Proposal
    first: int
    end: int  # == first for a context chunk that is not the last


class Verifier:
    """Applies the accept rules to a whole batch."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def draw(
        self, batch: Batch, proposals: Items[Proposal], logits: Logits
    ) -> tuple[list[Owner], list[int]]:
        """The target's own token at every row of `logits` [rows, vocab], and whose rows they are.

        Waits for the target. Raises BadLogits.
        """
        owners = _owners(batch, proposals)
        return owners, self._sampler.require_tokens(self._target_tokens(owners, logits), "target")

    def commit(self, owners: list[Owner], tokens: list[int], logits: Logits) -> list[Commit]:
        """Extend every sequence of the batch by what `draw` found.

        One Commit per slice, in packed order. Updates tokens, log_probs, kv_len, finish_reason.
        """
        return [self._commit_one(owner, tokens, logits) for owner in owners]

    def _target_tokens(self, owners: list[Owner], logits: Logits) -> list[int]:
        """The target's own token at every row, under the drafts before it (accept by tokens).

        Rows after the first difference are drawn in vain, and all at once costs less than row by
        row. Rows of proposals that are accepted by logits get 0.
        """
        sampler = self._sampler
        if all(sampler.is_plain(owner.item.sequence) for owner in owners):
            return sampler.backend.argmax(logits).tolist() if len(logits) else []
        tokens = np.zeros(len(logits), np.int64)
        asked = [owner for owner in owners if owner.proposal.probs is None]
        indexes = [row for owner in asked for row in range(owner.first, owner.end)]
        if indexes:
            rows = [
                sampler.row(item.sequence, proposal.token_ids[: row - first])
                for item, proposal, first, end in asked
                for row in range(first, end)
            ]
            wanted = logits if len(indexes) == len(logits) else logits[indexes]
            tokens[indexes] = sampler.backend.sample_rows(wanted, rows)
        return tokens.tolist()

    def _commit_one(self, owner: Owner, tokens: list[int], logits: Logits) -> Commit:
        item, proposal, first, end = owner
        if first == end:
            item.sequence.kv_len = item.start + item.num_tokens
            return Commit(item.sequence, 0)
        if end == first + 1 and not item.sequence.request.output_config.return_log_probs:
            return self._extend(item, proposal, logits, 0, tokens[first])
        rows = logits[first:end]
        if proposal.num_forced is not None:
            accepted, token = proposal.num_forced, tokens[first + proposal.num_forced]
        elif proposal.probs is None:
            accepted, token = accept_tokens(proposal.token_ids, tokens[first:end])
        else:
            accepted, token = self._accept_by_logits(item.sequence, proposal, rows)
        return self._extend(item, proposal, rows, accepted, token)

    def _accept_by_logits(
        self, sequence: Sequence, proposal: Proposal, rows: Logits
    ) -> tuple[int, int]:
        backend, drafts = self._sampler.backend, proposal.token_ids
        sampling_rows = [self._sampler.row(sequence, drafts[:i]) for i in range(len(rows))]
        self._sampler.require_tokens(backend.argmax(rows).tolist(), "target")
        target_probs = backend.processed_probs(rows, sampling_rows)
        uniforms = backend.uniforms(
            [replace(row, stream=ACCEPT_STREAM) for row in sampling_rows[:-1]]
        )
        assert proposal.probs is not None
        accepted, probs = accept_logits(drafts, proposal.probs, target_probs, uniforms)
        return accepted, backend.draw_from_probs(probs, sampling_rows[accepted])

    def _extend(
        self, item: Slice, proposal: Proposal, rows: Logits, accepted: int, token: int
    ) -> Commit:
        sequence = item.sequence
        run = [*proposal.token_ids[:accepted], token]
        num_kept, sequence.finish_reason = first_stop(sequence, run)
        del run[num_kept:]
        if sequence.request.output_config.return_log_probs:
            sequence.log_probs += self._sampler.backend.log_softmax_at(rows[:num_kept], run)
        sequence.tokens += run
        valid = item.start + item.num_tokens + accepted
        sequence.kv_len = min(valid, len(sequence.tokens) - 1)
        return Commit(sequence, num_kept, len(proposal.token_ids), accepted)


def _owners(batch: Batch, proposals: Items[Proposal]) -> list[Owner]:
    no_drafts = Proposal()
    owners = []
    row = 0
    for item in batch.context:
        end = row + item.needs_logits
        owners.append(Owner(item, no_drafts, row, end))
        row = end
    for item, proposal in zip(batch.generation, proposals, strict=True):
        end = row + 1 + len(proposal.token_ids)
        owners.append(Owner(item, proposal, row, end))
        row = end
    return owners
