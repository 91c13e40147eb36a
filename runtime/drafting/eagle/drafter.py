"""Drafts from an EAGLE head, which has a KV cache under the target's block ids.

When a step is over the head reads the pairs that it committed (pairs.py); the last pair of each
sequence gives its next first drafts. Each draft that others follow then makes a pair with what the
head put out for the one before (growth/growth.py says which do):

    committed   t t t r | d1 d2 d3              r: the target's own token, at position c - 1
    pairs      (f t)(f r) | (o d1)(o d2)        valid afterwards: c - 1 entries, those of drafts not

Entries of drafts are written over when the next pairs are read, so nothing is moved or taken back.
Since that happens before blocks are published, a published block has the head's content, too. Only
its last entry may be of another sequence that went on differently: it has the token behind the
block. That can make a draft worse, and never the text.

Requests whose tokens are not the likeliest (sampled, with penalties or banned words) draft a chain,
drawn as the target will draw at the same positions, with the same noise: a tree of likely tokens
would know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.eagle.pairs import Pairs, committed_pairs
from llmctl.runtime.drafting.growth.grower import Grower, Levels
from llmctl.runtime.drafting.growth.growth import Growth, Plant
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence


class Head(Levels, Protocol):
    """What runs the steps of an EAGLE head; `EngineHead` is one. Steps follow one another without a
    step of the target between them, but for `extend`, which comes behind one."""

    @property
    def holders(self) -> Mapping[str, BlockHolder]:
        """The KV cache of its layer, by name."""

    def extend(self, pairs: Items[Pairs]) -> None:
        """Read pairs whose features are in the target's last step. Its rows are those that drafts
        are wanted of."""


class EagleDrafter(WithoutWindow):
    """Drafts for every sequence that was in the target's last step, all together; chains, or the
    trees of `plant`."""

    def __init__(self, head: Head, max_draft_len: int, plant: Plant | None = None) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = max_draft_len
        self.holders = head.holders
        self._head = head
        self._plant = plant
        self.rows = HiddenRows()  # of the head's last step, after `commit`
        self._drafts: list[Drafts] = []  # of the step under way

    @property
    def head(self) -> Head:
        """What it drafts from."""
        return self._head

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Keep the target's sampler. Drafts are accepted by tokens."""
        self._grower = Grower(self._head, sampler, self._plant)

    def propose(self, batch: Batch) -> list[Drafts]:
        """Drafts for all that have a row and room."""
        rows = self.rows.take()
        growths: dict[int, Growth] = {}
        for item in batch.generation:
            row = rows.get(item.sequence.sequence_id)
            room = min(item.draft_len, self.max_draft_len)
            if row is not None and room > 0:
                growths[item.sequence.sequence_id] = self._grower.start(item.sequence, row, room)
        active = list(growths.values())
        if active:
            self._grower.offer(active, [[own.row] for own in active])
            self._grower.grow(active)
        found = (growths.get(item.sequence.sequence_id) for item in batch.generation)
        self._drafts = [own.drafts() if own else Drafts() for own in found]
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
