"""Heaps of tree nodes with lazy deletion.

A node is pushed again whenever its key changes; an entry is current only if its key is still that
of its node. Stale entries are dropped when they reach the top, or all at once when they outnumber
the nodes there can be.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from llmctl.runtime.kv_cache.radix_tree import Node

Key = tuple[float, int]  # (priority, last use) or (time, 0)


class LazyHeap:
    """Nodes by key, the smallest first. `is_current(key, node)` tells whether an entry is still
    valid; at most `capacity` nodes are current at a time."""

    def __init__(self, is_current: Callable[[Key, Node], bool], capacity: int) -> None:
        self._is_current = is_current
        self._most_entries = 2 * capacity + 64
        self._entries: list[tuple[Key, int, Node]] = []
        self._numbers = count()  # tie-breaker, so that nodes are never compared

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, key: Key, node: Node) -> bool:
        """True if the node has an entry with this key. Looks at every entry."""
        return any(entry[0] == key and entry[2] is node for entry in self._entries)

    def push(self, key: Key, node: Node) -> None:
        """Push a node with its current key."""
        heappush(self._entries, (key, next(self._numbers), node))
        if len(self._entries) > self._most_entries:
            current = {
                id(entry[2]): entry
                for entry in self._entries
                if self._is_current(entry[0], entry[2])
            }
            self._entries = list(current.values())
            heapify(self._entries)

    def peek(self) -> tuple[Key, Node] | None:
        """The node that comes first; None when there is none."""
        entries = self._entries
        while entries:
            key, _, node = entries[0]
            if self._is_current(key, node):
                return key, node
            heappop(entries)
        return None


def worth(node: Node) -> Key:
    """The eviction key of a block: the lowest priority first, then the least recently used."""
    return node.priority, node.last_used


def is_device_victim(key: Key, node: Node) -> bool:
    """True while `node` may be evicted from the device, with this key."""
    return node.is_device_leaf and key == worth(node)


def is_host_victim(key: Key, node: Node) -> bool:
    """True while `node` may be evicted from host memory, with this key."""
    return node.is_host_leaf and key == worth(node)


def is_expiring(key: Key, node: Node) -> bool:
    """True while the priority of `node` ends at the entry's time."""
    return node.expires_at == key[0]
