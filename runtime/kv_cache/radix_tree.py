"""Prefix tree of full KV blocks, keyed by token content and chained through the parent.

A node is one block with known content: the keys on the path from the root are exactly the tokens it
was computed from, and how their attention was computed. Its content is on the device or in host
memory. A sequence that uses a node uses its whole path, and used nodes are on the device; eviction
removes leaves. So a path has used blocks first, then unused ones on the device, then those in host
memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import NamedTuple

from llmctl.runtime.api.retention import DEFAULT_PRIORITY

NOWHERE = -1


class Key(NamedTuple):
    """What a block's content follows from, beside the blocks before it. is_fp8: attention of its
    tokens had FP8 products (fp8_context.py), which give other keys and values from the second layer
    on."""

    tokens: tuple[int, ...]
    is_fp8: bool = False


class Node:
    """One full block in the tree. `depth` counts blocks from the root, which has depth 0."""

    __slots__ = (
        "block_hash",
        "block_id",
        "children",
        "depth",
        "duration_s",
        "expires_at",
        "groups",
        "host_slot",
        "key",
        "last_used",
        "num_device_children",
        "num_users",
        "parent",
        "priority",
    )

    def __init__(self, parent: Node | None, key: Key, block_id: int) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id  # on the device, or NOWHERE
        # in host memory; exactly one of the two is set until it is removed
        self.host_slot = NOWHERE
        self.groups = 1  # the cache groups that have its content, a bit each; group 0 always
        # identifies the content in events; None if events are off
        self.block_hash: int | None = None
        self.children: dict[Key, Node] = {}
        self.num_device_children = 0
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.num_users = 0
        self.last_used = 0  # the store's use counter at the last use
        self.priority = DEFAULT_PRIORITY
        self.duration_s: float | None = None  # how long the priority lasts once unused
        self.expires_at: float | None = None  # when it ends; None while used or without end

    @property
    def is_on_device(self) -> bool:
        """False when the content lies in host memory."""
        return self.block_id != NOWHERE

    @property
    def is_cached(self) -> bool:
        """False once the content is neither on the device nor in host memory."""
        return self.is_on_device or self.host_slot != NOWHERE

    @property
    def is_device_leaf(self) -> bool:
        """True for an unused block on the device that no other one there continues."""
        return self.is_on_device and self.num_users == 0 and self.num_device_children == 0

    @property
    def is_host_leaf(self) -> bool:
        """True for an unused block in host memory that no other one continues."""
        return self.host_slot != NOWHERE and self.num_users == 0 and not self.children


class RadixTree:
    """Finds the longest known prefix of a token list."""

    def __init__(self, tokens_per_block: int) -> None:
        self.root = Node(None, Key(()), NOWHERE)
        self._tokens_per_block = tokens_per_block

    def longest_match(self, tokens: Row[int], limit: int, context_end: int = 0) -> Node:
        """The deepest node whose path is a prefix of tokens[:limit], those before `context_end`
        computed with FP8 products and no others; the root when none is."""
        size = self._tokens_per_block
        node = self.root
        for end in range(size, limit + 1, size):
            child = node.children.get(Key(tuple(tokens[end - size : end]), end <= context_end))
            if child is None:
                break
            node = child
        return node

    def partial_match(self, node: Node, rest: Row[int]) -> tuple[Node | None, int]:
        """The child of `node` that shares most leading tokens with `rest`, and how many; none whose
        attention had FP8 products, which are reused in whole groups of blocks."""
        best, best_len = None, 0
        for child in node.children.values():
            shared = _common_prefix_len(child.key.tokens, rest)
            if shared > best_len and not child.key.is_fp8:
                best, best_len = child, shared
        return best, best_len

    def add(self, parent: Node, key: Key, block_id: int) -> Node:
        """Insert a block of the device under `parent`."""
        child = parent.children[key] = Node(parent, key, block_id)
        parent.num_device_children += 1
        return child

    def remove(self, node: Node) -> list[Node]:
        """Cut off `node` with everything below it; what was cut off, parents before children."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        parent.num_device_children -= node.is_on_device
        return below(node)

    def nodes(self) -> list[Node]:
        """Every node but the root, parents before children."""
        return below(self.root)[1:]


def below(node: Node) -> list[Node]:
    """`node` and everything below it, parents before children."""
    found = [node]
    for item in found:
        found.extend(item.children.values())
    return found


def path_to(node: Node) -> list[Node]:
    """The nodes from just below the root down to `node`."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _common_prefix_len(key: tuple[int, ...], rest: Row[int]) -> int:
    for index, (ours, theirs) in enumerate(zip(key, rest, strict=False)):
        if ours != theirs:
            return index
    return min(len(key), len(rest))
