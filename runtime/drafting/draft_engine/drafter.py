"""Drafts from a second, smaller engine.

The draft engine's KV cache uses the target's block ids. In a round the draft engine reads every
committed token it has not seen (only the root; the root and the last draft after a full acceptance;
or more after rounds without drafts), then each draft but the last:

    tokens   ... t  t  r | d1 d2 d3 d4        c = committed tokens, r = tokens[c - 1]
    fed            [t  r]  d1 d2 d3           valid afterwards: c + 3 entries, d4's is missing

After `a` accepted drafts the first min(c + a, c + 3) entries stay valid. Context slices are read in
the same chunks as by the target, without logits.

With acceptance by tokens, sampled requests draw drafts with the noise that the target will use at
the same positions, so the two are likely to pick the same token. With acceptance by logits, drafts
have their own random stream and their distributions are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmctl.errors import BadConfig, PairMismatch
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.spec import (
    DRAFT_STREAM,
    TARGET_STREAM,
    Logits,
    SamplingRow,
)
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.feeding import cut
from llmctl.runtime.drafting.draft_engine.method import ROLE
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence
from llmctl.runtime.step import Span, StepRunner, block_tables, pack, pack_next


@dataclass(slots=True)
class _Round:
    """One sequence's drafts while they are made."""

    sequence: Sequence
    num_wanted: int
    num_committed: int  # c, when the round began
    tokens: list[int] = field(default_factory=list)
    probs: list[NDArray[np.float64]] = field(default_factory=list)
    num_fed: int = 0  # drafts that have KV entries

    @property
    def is_done(self) -> bool:
        """True when no further draft is wanted: nothing follows an end id."""
        if len(self.tokens) >= self.num_wanted:
            return True
        return self.tokens[-1] == self.sequence.request.end_id


class DraftEngineDrafter(WithoutWindow):
    """Runs a draft engine for all generation sequences together, up to `max_draft_len` steps."""

    def __init__(self, draft: StepRunner, max_draft_len: int) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = max_draft_len
        self._draft = draft
        self.holders: Mapping[str, BlockHolder] = {ROLE: draft}
        self._rounds: dict[int, _Round] = {}  # by sequence id, between propose and commit

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Allocate the draft's cache; see Drafter.prepare. Raises PairMismatch."""
        if self._draft.tokens_per_block != kv_cache.tokens_per_block:
            raise PairMismatch(
                f"the draft engine has {self._draft.tokens_per_block} tokens per KV block, "
                f"the target engine {kv_cache.tokens_per_block}; they share block ids",
                fix="rebuild one of them with the other's --tokens_per_block",
            )
        self._draft.allocate_kv_cache(kv_cache.num_blocks)
        if kv_cache.num_host_blocks:
            self._draft.allocate_host_blocks(kv_cache.num_host_blocks)
        self._sampler = sampler
        self._keep_probs = keep_probs

    def propose(self, batch: Batch) -> list[Drafts]:
        """Feed what is missing, then draft step by step, all sequences together."""
        self._rounds = {}
        limit = self._draft.max_seq_len
        spans = []
        for item in batch.context:
            end = min(item.start + item.num_tokens, limit)
            spans.append(
                Span(item.sequence, item.sequence.kv_lens[DRAFT_GROUP], end, needs_logits=False)
            )
        for item in batch.generation:
            sequence, committed = item.sequence, len(item.sequence.tokens)
            # The last draft is not read, so it may be one past the draft engine's last position.
            wanted = min(item.draft_len, self.max_draft_len, limit - committed + 1)
            if wanted > 0:
                self._rounds[sequence.sequence_id] = _Round(sequence, wanted, committed)
                spans.append(Span(sequence, sequence.kv_lens[DRAFT_GROUP], committed))
        self._feed(spans)
        self._extend()
        return [self._drafts(item.sequence) for item in batch.generation]

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Rewind each sequence's draft cache to what the target confirmed."""
        for item, num_accepted in zip(batch.generation, accepted, strict=True):
            sequence = item.sequence
            done = self._rounds.pop(sequence.sequence_id, None)
            if done is not None:
                valid = done.num_committed + min(num_accepted, done.num_fed)
                sequence.kv_lens[DRAFT_GROUP] = min(valid, len(sequence.tokens) - 1)

    def release(self, sequence: Sequence) -> None:
        """Forget an unfinished round."""
        self._rounds.pop(sequence.sequence_id, None)

    def _feed(self, spans: list[Span]) -> None:
        """Bring the draft's cache up to date; sequences in a round get their first draft."""
        for call in cut(spans, self._draft.max_num_tokens, self._draft.max_batch_size):
            logits = self._run(pack(call, self._draft.tokens_per_block))
            for span in call:
                span.sequence.kv_lens[DRAFT_GROUP] = span.end
            ready = [self._rounds[s.sequence.sequence_id] for s in call if s.needs_logits]
            if ready:
                self._choose(logits, ready)

    def _extend(self) -> None:
        """Single-token steps until every round has its drafts."""
        width = min(self._draft.max_batch_size, self._draft.max_num_tokens)
        active = [item for item in self._rounds.values() if not item.is_done]
        tables = block_tables([item.sequence for item in active])
        while active:
            for first in range(0, len(active), width):
                group = active[first : first + width]
                tokens = np.array([item.tokens[-1] for item in group], np.int32)
                positions = np.array(
                    [item.num_committed + item.num_fed for item in group], np.int32
                )
                rows = tables[first : first + width]
                step = pack_next(tokens, positions, rows, self._draft.tokens_per_block)
                logits = self._run(step)
                for item in group:
                    item.num_fed += 1
                self._choose(logits, group)
            still = [index for index, item in enumerate(active) if not item.is_done]
            if len(still) < len(active):
                active = [active[index] for index in still]
                tables = tables[still]

    def _run(self, step: StepInputs) -> Logits:
        if self._draft.vocab_size < self._sampler.vocab_size:
            # Padding of the target's vocabulary: any id of the draft engine can be used instead.
            np.minimum(step.token_ids, self._draft.vocab_size - 1, out=step.token_ids)
        return self._draft.run(step)

    def _choose(self, logits: Logits, rounds: list[_Round]) -> None:
        """Append one draft to each round, from its row of draft logits."""
        sampler = self._sampler
        if logits.shape[1] > sampler.vocab_size:  # padded vocabulary: ids the target lacks
            logits = _narrow(logits, sampler.vocab_size)
        if all(sampler.is_plain(item.sequence) for item in rounds):
            tokens = sampler.require_tokens(sampler.backend.argmax(logits).tolist(), "draft")
        else:
            stream = DRAFT_STREAM if self._keep_probs else TARGET_STREAM
            rows = [sampler.row(item.sequence, item.tokens, stream) for item in rounds]
            drawn = sampler.backend.sample_rows(logits, rows).tolist()
            tokens = sampler.require_tokens(drawn, "draft")
            if self._keep_probs:
                self._store_probs(logits, rows, rounds)
        for item, token in zip(rounds, tokens, strict=True):
            item.tokens.append(token)

    def _store_probs(self, logits: Logits, rows: list[SamplingRow], rounds: list[_Round]) -> None:
        """Keep the distributions that sampled drafts were drawn from, over the target's ids."""
        sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        if not sampled:
            return
        chosen = logits if len(sampled) == len(rows) else logits[sampled]
        probs = self._sampler.backend.processed_probs(chosen, [rows[index] for index in sampled])
        missing = self._sampler.vocab_size - probs.shape[1]  # ids that the draft lacks
        if missing:
            probs = np.pad(probs, ((0, 0), (0, missing)))
        for index, row_probs in zip(sampled, probs, strict=True):
            rounds[index].probs.append(row_probs)

    def _drafts(self, sequence: Sequence) -> Drafts:
        done = self._rounds.get(sequence.sequence_id)
        if done is None:
            return Drafts()
        return Drafts(done.tokens, probs=np.stack(done.probs) if done.probs else None)


def _narrow(logits: Logits, vocab_size: int) -> Logits:
    """The first ids of every row, wherever the rows are."""
    if isinstance(logits, np.ndarray):
        return np.ascontiguousarray(logits[:, :vocab_size])
    return logits.columns(vocab_size)
