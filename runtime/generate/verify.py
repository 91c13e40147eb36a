"""From the target's logits to committed tokens: draw, accept, commit."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmctl.errors import BadLogits
from llmctl.plugins.ops.sampling.spec import ACCEPT_STREAM, BestIds, Logits
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.generate.accept import accept_logits, accept_tokens, accept_typical
from llmctl.runtime.generate.commit import Commit, commit
from llmctl.runtime.generate.sampler import Sampler, bad_logits
from llmctl.runtime.request import Batch, Sequence, Slice


class Owner(NamedTuple):
    """A slice, its drafts, and its rows of logits [first, end)."""

    item: Slice
    drafts: Drafts
    first: int
    end: int  # == first for a context chunk that is not the last


class Verifier:
    """Applies the accept rules to a whole batch."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def wants_best(self, batch: Batch, drafts: Items[Drafts]) -> bool:
        """Whether the best id of each row is all that is going to be read of the target's logits.
        Where it is not, they are needed whole: a draw compares those of all ids, and so do
        penalties, bans, log-probabilities and acceptance by logits."""
        sequences = [item.sequence for item in batch.slices]
        return (
            all(proposed.probs is None for proposed in drafts)
            and not any(each.request.output_config.return_log_probs for each in sequences)
            and all(map(self._sampler.is_plain, sequences))
        )

    def draw(
        self, batch: Batch, drafts: Items[Drafts], logits: Logits
    ) -> tuple[list[Owner], list[int]]:
        """The target's own token at every row of `logits` [rows, vocab], or BestIds where
        `wants_best`, and whose rows they are; negative where logits are NaN, or infinite.

        Waits for the target.
        """
        owners = _owners(batch, drafts)
        return owners, self._target_tokens(owners, logits)

    def commit(self, owners: list[Owner], tokens: list[int], logits: Logits) -> list[Commit]:
        """Extend every sequence of the batch by what `draw` found.

        One Commit per slice, in packed order. Updates tokens, log_probs, kv_len, finish_reason.
        A sequence fails with BadLogits where there is no token in a row that its path reaches: what
        is behind rejected drafts is nothing that plain decoding computes, and decides nothing.
        """
        return [self._commit_or_fail(owner, tokens, logits) for owner in owners]

    def _commit_or_fail(self, owner: Owner, tokens: list[int], logits: Logits) -> Commit:
        sequence = owner.item.sequence
        try:
            if sequence.error is None:  # else its drafts were none
                return self._commit_one(owner, tokens, logits)
        except BadLogits as error:
            sequence.fail(error)
        return Commit(sequence, 0)

    def _target_tokens(self, owners: list[Owner], logits: Logits) -> list[int]:
        """The target's own token at every row, given the drafts before it (acceptance by tokens).

        Rows after the first difference are drawn although they are not needed: drawing all rows at
        once costs less than one by one. Rows of drafts that are accepted by logits get 0.
        """
        sampler = self._sampler
        if isinstance(logits, BestIds):
            best: list[int] = logits.read().tolist()
            return best
        if all(sampler.is_plain(owner.item.sequence) for owner in owners):
            return sampler.backend.argmax(logits).tolist() if len(logits) else []
        tokens = np.zeros(len(logits), np.int64)
        asked = [owner for owner in owners if owner.drafts.probs is None]
        indexes = [row for owner in asked for row in range(owner.first, owner.end)]
        if indexes:
            rows = [
                sampler.row(item.sequence, drafts.tokens_to(ROOT + row - first))
                for item, drafts, first, end in asked
                for row in range(first, end)
            ]
            wanted = logits if len(indexes) == len(logits) else logits[indexes]
            tokens[indexes] = sampler.backend.sample_rows(wanted, rows)
        return tokens.tolist()

    def _commit_one(self, owner: Owner, tokens: list[int], logits: Logits) -> Commit:
        item, drafts, first, end = owner
        if first == end:
            item.sequence.kv_len = item.start + item.num_tokens
            return Commit(item.sequence, 0)
        if end == first + 1 and not item.sequence.request.output_config.return_log_probs:
            self._require(tokens[first], owner, tokens)
            return commit(item.sequence, [tokens[first]], (), 0)
        rows: Logits = None if isinstance(logits, BestIds) else logits[first:end]
        path: Items[int]
        if drafts.num_forced is not None:
            path, token = range(drafts.num_forced), tokens[first + drafts.num_forced]
        elif drafts.probs is not None:
            path, token = self._accept_by_logits(item.sequence, drafts, drafts.probs, rows)
        elif item.sequence.request.sampling_config.accepts_typical:
            path = self._accept_typical(item.sequence, drafts, rows)
            reached = [tokens[first], *(tokens[first + 1 + index] for index in path)]
            self._require(min(reached), owner, tokens)
            token = reached[-1]
        else:
            path, token = accept_tokens(drafts, tokens[first:end])
        self._require(token, owner, tokens)
        run = [*(drafts.tokens[index] for index in path), token]
        done = commit(item.sequence, run, path, len(drafts.tokens))
        if drafts.parents is not None:
            done = done._replace(depth=drafts.depth)
        if item.sequence.request.output_config.return_log_probs:
            if drafts.parents is None:
                rows = rows[: done.num_tokens]
            else:
                rows = rows[[0, *(1 + index for index in path)][: done.num_tokens]]
            item.sequence.log_probs += self._sampler.backend.log_softmax_at(rows, run)
        return done

    def _require(self, token: int, owner: Owner, tokens: list[int]) -> None:
        """Raise BadLogits if what was drawn in a row that the path reaches is no token."""
        if token < 0:
            raise bad_logits("target", tokens[owner.first : owner.end])

    def _accept_by_logits(
        self, sequence: Sequence, drafts: Drafts, draft_probs: NDArray[np.float64], rows: Logits
    ) -> tuple[Items[int], int]:
        backend, tokens = self._sampler.backend, drafts.tokens
        sampling_rows = [self._sampler.row(sequence, tokens[:i]) for i in range(len(rows))]
        best = backend.argmax(rows).tolist()
        target_probs = backend.processed_probs(rows, sampling_rows)
        uniforms = backend.uniforms(
            [replace(row, stream=ACCEPT_STREAM) for row in sampling_rows[:-1]]
        )
        accepted, probs = accept_logits(tokens, draft_probs, target_probs, uniforms)
        if min(best[: accepted + 1]) < 0:
            raise bad_logits("target", best[: accepted + 1])
        return range(accepted), backend.draw_from_probs(probs, sampling_rows[accepted])

    def _accept_typical(self, sequence: Sequence, drafts: Drafts, rows: Logits) -> Items[int]:
        """The path that typical acceptance keeps; the target's own draw behind it follows."""
        rule = sequence.request.sampling_config.typical_acceptance
        assert rule is not None, "asked for"
        paths = [drafts.tokens_to(ROOT + row) for row in range(len(rows))]
        sampling_rows = [self._sampler.row(sequence, path) for path in paths]
        probs = self._sampler.backend.processed_probs(rows, sampling_rows)
        return accept_typical(drafts, probs, rule.threshold, rule.alpha)


def _owners(batch: Batch, drafts: Items[Drafts]) -> list[Owner]:
    none = Drafts()
    owners = []
    row = 0
    for item in batch.context:
        end = row + item.needs_logits
        owners.append(Owner(item, none, row, end))
        row = end
    for item, proposed in zip(batch.generation, drafts, strict=True):
        end = row + 1 + len(proposed.tokens)
        owners.append(Owner(item, proposed, row, end))
        row = end
    return owners
