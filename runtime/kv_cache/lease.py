"""What the cache tracks for a sequence that holds blocks."""

from __future__ import annotations

from llmctl.runtime.api.retention import Retention
from llmctl.runtime.kv_cache.groups import mark_computed
from llmctl.runtime.kv_cache.radix_tree import Node
from llmctl.runtime.kv_cache.window import AttentionWindow
from llmctl.runtime.request import Sequence


class Lease:
    """The first tail.depth blocks of the sequence are in the tree; `num_dropped` entries of its
    table, after the sinks, stand for blocks that it gave back. `arrival` is the batch of copies
    after which it may run. `num_computed` is, for each group, how many of its blocks in the tree
    are marked as computed."""

    __slots__ = ("arrival", "num_computed", "num_dropped", "sequence", "tail")

    def __init__(self, sequence: Sequence, tail: Node, num_computed: list[int]) -> None:
        self.sequence = sequence
        self.tail = tail
        self.num_dropped = 0
        self.num_computed = num_computed
        self.arrival = 0

    def mark_computed(self, tokens_per_block: int) -> None:
        """Mark in the tree what the groups other than group 0 have computed of its blocks since."""
        lens = self.sequence.kv_lens
        for group, count in enumerate(self.num_computed):
            if group and lens[group] >= (count + 1) * tokens_per_block:
                num_blocks = min(lens[group] // tokens_per_block, self.tail.depth)
                if num_blocks > count:
                    self.num_computed[group] = num_blocks
                    mark_computed(self.tail, num_blocks, group)

    def retention(self, node: Node, tokens_per_block: int) -> Retention | None:
        """The request's retention for a block on the path; None: not set."""
        config = self.sequence.request.kv_cache_retention_config
        if config is None:
            return None
        return config.of_block((node.depth - 1) * tokens_per_block, self.sequence.num_prompt_tokens)

    def drop_unseen(
        self, window: AttentionWindow, tokens_per_block: int, null_block: int
    ) -> list[int]:
        """Replace blocks outside the window of every future query by `null_block`; returns those
        blocks."""
        sequence, table = self.sequence, self.sequence.block_table
        # The window of a group that lags behind starts at its own position.
        position = max(min(sequence.kv_lens), sequence.kv_len - window.group_lag)
        first = -(-window.sink_end // tokens_per_block) + self.num_dropped
        end = max(first, window.oldest(position) // tokens_per_block)
        unseen = table[first:end]
        table[first:end] = [null_block] * len(unseen)
        self.num_dropped += len(unseen)
        return unseen
