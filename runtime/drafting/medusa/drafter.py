"""Drafts from heads that read the target's last hidden state (hidden_rows.py): head 0 says what
follows the target's own token, head 1 what comes after that."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import cache, partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import MedusaTree
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy
from llmctl.runtime.drafting.static_nodes import Nodes, first_nodes
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence


class Heads(Protocol):
    """What runs the heads; `EngineHeads` is one."""

    def top_tokens(self, rows: NDArray[np.int32], count: int) -> NDArray[np.int64]:
        """[rows, heads, count]: each head's likeliest tokens, the likeliest first, for rows of the
        target's last step. A step may follow only then."""


class MedusaDrafter(WithoutWindow):
    """Fills a static tree with the heads' tokens; a request with less room gets its first nodes.

    accuracy: counts what the heads said, of so many ranks, whatever the tree takes of it. rows: of
    its sequences, which device rounds take over and hand back.
    """

    holders: Mapping[str, BlockHolder] = MappingProxyType({})

    def __init__(
        self,
        heads: Heads,
        tree: MedusaTree,
        max_draft_len: int,
        accuracy: HeadAccuracy | None = None,
        num_ranks: int = 1,
    ) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = min(max_draft_len, tree.num_nodes)
        self._heads = heads
        self._nodes = cache(partial(first_nodes, tree))
        self._num_ranks = max(num_ranks, 1 + max(path[-1] for path in tree.paths))
        self._accuracy = accuracy
        self.rows = HiddenRows()

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare: trees are accepted by tokens."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Trees for all that have a row and room, in one run of the heads."""
        rows = self.rows.take()
        drafts = [Drafts()] * len(batch.generation)
        ids = [item.sequence.sequence_id for item in batch.generation]
        asked = [i for i, item in enumerate(batch.generation) if item.draft_len and ids[i] in rows]
        if asked:
            wanted = np.array([rows[ids[i]] for i in asked], np.int32)
            tokens = self._heads.top_tokens(wanted, self._num_ranks)
            for i, own in zip(asked, tokens, strict=True):
                room = min(batch.generation[i].draft_len, self.max_draft_len)
                drafts[i] = _fill(self._nodes(room), own)
                if self._accuracy is not None:
                    self._accuracy.note(batch.generation[i].sequence, own)
        self.rows.start(batch, drafts)
        return drafts

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Note the row of each sequence's last accepted token."""
        self.rows.commit(accepted)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's row."""
        self.rows.forget(sequence)
        if self._accuracy is not None:
            self._accuracy.forget(sequence)


def _fill(nodes: Nodes, tokens: NDArray[np.int64]) -> Drafts:
    """The nodes with their tokens of [heads, ranks]."""
    return Drafts.of(tokens[nodes.heads, nodes.ranks].tolist(), nodes.parents)
