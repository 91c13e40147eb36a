"""Drafts from an EAGLE head, which has a KV cache under the target's block ids.

When a step is over the head reads the pairs that it committed (pairs.py); the last pair of each
sequence gives its next first draft. Each draft then makes a pair with what the head put out for the
one before:

    committed   t t t r | d1 d2 d3              r: the target's own token, at position c - 1
    pairs      (f t)(f r) | (o d1)(o d2)        valid afterwards: c - 1 entries, those of drafts not

Entries of drafts are written over when the next pairs are read, so nothing is moved or taken back.
Since that happens before blocks are published, a published block has the head's content, too. Only
its last entry may be of another sequence that went on differently: it has the token behind the
block. That can make a draft worse, and never the text.

Sampled requests draw drafts with the noise that the target will use at the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.errors import BadConfig
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.eagle.pairs import Pairs, committed_pairs
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence
from llmctl.runtime.step import block_tables


class Head(Protocol):
    """What runs the steps of an EAGLE head; `EngineHead` is one. Steps follow one another without a
    step of the target between them, but for `extend`, which comes behind one."""

    @property
    def holders(self) -> Mapping[str, BlockHolder]:
        """The KV cache of its layer, by name."""

    def extend(self, pairs: Items[Pairs]) -> None:
        """Read pairs whose features are in the target's last step. Its rows are those that drafts
        are wanted of."""

    def logits(self, rows: list[int]) -> Logits:
        """[len(rows), vocab] of rows of the last step."""

    def next(
        self,
        rows: list[int],
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> Logits:
        """[N, vocab] behind `tokens` [N] at `positions` [N], each of which continues a row of the
        step before; `tables` [N, blocks]."""


@dataclass(slots=True)
class _Chain:
    """The drafts of one sequence while they are made."""

    sequence: Sequence
    num_wanted: int
    row: int  # of the head's last step
    tokens: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """No further draft is wanted: nothing follows an end id."""
        if len(self.tokens) >= self.num_wanted:
            return True
        return self.tokens[-1] == self.sequence.request.end_id


class EagleDrafter(WithoutWindow):
    """Drafts a chain for every sequence that was in the target's last step, all together."""

    def __init__(self, head: Head, max_draft_len: int) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = max_draft_len
        self.holders = head.holders
        self._head = head
        self.rows = HiddenRows()  # of the head's last step, after `commit`
        self._drafts: list[Drafts] = []  # of the step under way

    @property
    def head(self) -> Head:
        """What it drafts from."""
        return self._head

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Keep the target's sampler. Drafts are accepted by tokens."""
        self._sampler = sampler

    def propose(self, batch: Batch) -> list[Drafts]:
        """Chains for all that have a row and room."""
        rows = self.rows.take()
        chains: dict[int, _Chain] = {}
        for item in batch.generation:
            row = rows.get(item.sequence.sequence_id)
            wanted = min(item.draft_len, self.max_draft_len)
            if row is not None and wanted > 0:
                chains[item.sequence.sequence_id] = _Chain(item.sequence, wanted, row)
        self._extend(list(chains.values()))
        found = (chains.get(item.sequence.sequence_id) for item in batch.generation)
        self._drafts = [Drafts(chain.tokens) if chain else Drafts() for chain in found]
        return self._drafts

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Read what the step committed."""
        drafts, self._drafts = self._drafts, []
        pairs = committed_pairs(batch, drafts, accepted)
        if not pairs:
            return
        self._head.extend(pairs)
        for own in pairs:
            own.sequence.kv_lens[DRAFT_GROUP] = own.end
        for row, own in enumerate(own for own in pairs if own.wants_drafts):
            self.rows.note(own.sequence, row)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's row."""
        self.rows.forget(sequence)

    def _extend(self, active: list[_Chain]) -> None:
        """Steps of one token a sequence until every chain has its drafts."""
        if not active:
            return
        self._choose(self._head.logits([chain.row for chain in active]), active)
        while active := [chain for chain in active if not chain.is_done]:
            last = [len(chain.sequence.tokens) + len(chain.tokens) - 2 for chain in active]
            logits = self._head.next(
                [chain.row for chain in active],
                np.array([chain.tokens[-1] for chain in active], np.int32),
                np.array(last, np.int32),
                block_tables([chain.sequence for chain in active]),
            )
            for row, chain in enumerate(active):
                chain.row = row
            self._choose(logits, active)

    def _choose(self, logits: Logits, chains: list[_Chain]) -> None:
        """Append one draft to each chain, from its row of logits."""
        sampler = self._sampler
        if all(sampler.is_plain(chain.sequence) for chain in chains):
            tokens = sampler.backend.argmax(logits).tolist()
        else:
            rows = [sampler.row(chain.sequence, chain.tokens) for chain in chains]
            tokens = sampler.backend.sample_rows(logits, rows).tolist()
        for chain, token in zip(chains, sampler.require_tokens(tokens, "draft"), strict=True):
            chain.tokens.append(token)
