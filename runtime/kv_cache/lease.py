"""What the cache keeps of a sequence that holds blocks."""

from __future__ import annotations

from llmctl.runtime.api.retention import Retention
from llmctl.runtime.kv_cache.radix_tree import Node
from llmctl.runtime.kv_cache.window import AttentionWindow
from llmctl.runtime.request import Sequence


class Lease:
    """The first tail.depth blocks of the sequence are in the tree; `num_dropped` entries of its
    table, behind the sinks, stand for blocks that it gave back. `arrival` is the batch of copies
    after which it may run; `num_drafted` of the blocks in the tree are marked as drafted for it."""

    __slots__ = ("arrival", "num_drafted", "num_dropped", "sequence", "tail")

    def __init__(self, sequence: Sequence, tail: Node) -> None:
        self.sequence = sequence
        self.tail = tail
        self.num_dropped = 0
        self.num_drafted = 0
        self.arrival = 0

    def retention(self, node: Node, tokens_per_block: int) -> Retention | None:
        """What the request says of a block on the path; None: nothing."""
        config = self.sequence.request.kv_cache_retention_config
        if config is None:
            return None
        return config.of_block((node.depth - 1) * tokens_per_block, self.sequence.num_prompt_tokens)

    def drop_unseen(
        self, window: AttentionWindow, tokens_per_block: int, null_block: int, *, has_draft: bool
    ) -> list[int]:
        """Put `null_block` for the blocks before the window of every query to come; those."""
        sequence, table = self.sequence, self.sequence.block_table
        position = sequence.kv_len
        if has_draft:  # a draft that lags behind looks back from where it is
            position = max(min(position, sequence.draft_kv_len), position - window.draft_lag)
        first = -(-window.sink_end // tokens_per_block) + self.num_dropped
        end = max(first, window.oldest(position) // tokens_per_block)
        unseen = table[first:end]
        table[first:end] = [null_block] * len(unseen)
        self.num_dropped += len(unseen)
        return unseen
