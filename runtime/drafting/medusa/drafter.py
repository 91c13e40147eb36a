"""Drafts from heads that read the target's last hidden state.

A step of the target leaves a hidden row beside each row of logits. The row of the last accepted
token, or of the prompt's last, gave the target's own token, the root of the next round; the same
row, read by the heads, gives what may follow it:

    rows of a step   r | d0 d1 d2 ...     d1 accepted, then x, the target's own token
    heads read             ^^             head 0: after x; head 1: after that; ...

So there is no state but which row that was. A sequence that had no row in the last step (it waited,
or came back from a pause with all its blocks) drafts nothing this once.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import MedusaTree
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy
from llmctl.runtime.drafting.medusa.nodes import Nodes, first_nodes
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, Sequence


class Heads(Protocol):
    """What runs the heads; `EngineHeads` is one."""

    def top_tokens(self, rows: NDArray[np.int32], count: int) -> NDArray[np.int64]:
        """[rows, heads, count]: each head's likeliest tokens, the likeliest first, for rows of the
        target's last step. A step may follow only then."""


class _Root(NamedTuple):
    """What has rows in a step: the last token of `num_committed`, then its drafts."""

    sequence: Sequence
    num_committed: int
    drafts: Drafts


class MedusaDrafter:
    """Fills a static tree with the heads' tokens; a request with less room gets its first nodes.

    accuracy: counts what the heads said, of so many ranks, whatever the tree takes of it.
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
        self._rows: dict[int, int] = {}  # by sequence id: of the last step
        self._roots: list[_Root] = []  # of the step under way, in the order of its rows

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare: trees are accepted by tokens."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Trees for all that have a row and room, in one run of the heads."""
        rows, self._rows = self._rows, {}  # the step to come overwrites them, or fails
        none = Drafts()
        drafts = [none] * len(batch.generation)
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
        ends = [item for item in batch.context if item.needs_logits]
        self._roots = [
            *(_Root(item.sequence, item.start + item.num_tokens, none) for item in ends),
            *(
                _Root(item.sequence, item.start + item.num_tokens, own)
                for item, own in zip(batch.generation, drafts, strict=True)
            ),
        ]
        return drafts

    def commit(self, batch: Batch, accepted: Items[int]) -> None:
        """Note the row of each sequence's last accepted token."""
        prompts = len(self._roots) - len(accepted)
        row = 0
        for root, count in zip(self._roots, (*(0,) * prompts, *accepted), strict=True):
            path = root.sequence.tokens[root.num_committed : root.num_committed + count]
            self._rows[root.sequence.sequence_id] = row + 1 + _end_of(root.drafts, path)
            row += 1 + len(root.drafts.tokens)
        self._roots = []

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's row."""
        self._rows.pop(sequence.sequence_id, None)
        if self._accuracy is not None:
            self._accuracy.forget(sequence)


def _fill(nodes: Nodes, tokens: NDArray[np.int64]) -> Drafts:
    """The nodes with their tokens of [heads, ranks]. A chain is one to the engine too: its steps
    cost less than those of trees."""
    drafted: list[int] = tokens[nodes.heads, nodes.ranks].tolist()
    return Drafts(drafted, None if nodes.is_chain else nodes.parents)


def _end_of(drafts: Drafts, path: Items[int]) -> int:
    """The index of the last draft of an accepted path, by its tokens: siblings have different ones.
    ROOT where none was accepted; anything where a stop has cut the path, as nothing follows."""
    parents = drafts.parents
    if parents is None:
        return len(path) - 1
    last, depth = ROOT, 0
    for index, parent in enumerate(parents):  # parents come before their children
        if depth < len(path) and parent == last and drafts.tokens[index] == path[depth]:
            last, depth = index, depth + 1
    return last
