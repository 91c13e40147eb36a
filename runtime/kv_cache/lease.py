"""What the cache keeps of a sequence that holds blocks."""

from __future__ import annotations

from llmctl.runtime.core import Sequence
from llmctl.runtime.kv_cache.radix_tree import Node


class Lease:
    """The first tail.depth blocks of the sequence are in the tree; `num_dropped` entries of its
    table, behind the sinks, stand for blocks that it gave back."""

    __slots__ = ("num_dropped", "sequence", "tail")

    def __init__(self, sequence: Sequence, tail: Node) -> None:
        self.sequence = sequence
        self.tail = tail
        self.num_dropped = 0
