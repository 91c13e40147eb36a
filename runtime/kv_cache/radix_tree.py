"""Prefix tree of full KV blocks, keyed by token content and chained through the parent.

A node is one block whose content is known: the keys on the path from the root are exactly the
tokens it was computed from. A sequence that uses a node uses its whole path, so a node without
users has no descendant with users, and every unused block can be evicted sooner or later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Row


class Node:
    """One full block in the tree. `depth` counts blocks from the root, which has depth 0."""

    __slots__ = ("block_id", "children", "depth", "key", "num_users", "parent")

    def __init__(self, parent: Node | None, key: tuple[int, ...], block_id: int) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.children: dict[tuple[int, ...], Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.num_users = 0


class RadixTree:
    """Finds the longest known prefix of a token list; gives up its least recently used leaf.

    `unused` is ordered by the time a block lost its last user, children before parents, so its
    first entry is always a leaf.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.root = Node(None, (), -1)
        self.unused: OrderedDict[Node, None] = OrderedDict()
        self._tokens_per_block = tokens_per_block

    def longest_match(self, tokens: Row[int], limit: int) -> Node:
        """The deepest node whose path is a prefix of tokens[:limit]; the root when none is."""
        size = self._tokens_per_block
        node = self.root
        for end in range(size, limit + 1, size):
            child = node.children.get(tuple(tokens[end - size : end]))
            if child is None:
                break
            node = child
        return node

    def partial_match(self, node: Node, rest: Row[int]) -> tuple[Node | None, int]:
        """The child of `node` that shares most leading tokens with `rest`, and how many."""
        best, best_len = None, 0
        for child in node.children.values():
            shared = _common_prefix_len(child.key, rest)
            if shared > best_len:
                best, best_len = child, shared
        return best, best_len

    def add(self, parent: Node, key: tuple[int, ...], block_id: int) -> Node:
        """Insert a block under `parent`; its publisher is its first user."""
        child = parent.children[key] = Node(parent, key, block_id)
        child.num_users = 1
        return child

    def use(self, node: Node) -> None:
        """Count one more user of `node` alone; the caller uses the nodes above it already."""
        if node.num_users == 0:
            del self.unused[node]
        node.num_users += 1

    def use_path(self, node: Node) -> None:
        """Count one more user of `node` and of everything above it."""
        while node.parent is not None:
            self.use(node)
            node = node.parent

    def leave_path(self, node: Node) -> None:
        """Take one user from `node` and from everything above it, deepest first."""
        while node.parent is not None:
            node.num_users -= 1
            if node.num_users == 0:
                self.unused[node] = None
            node = node.parent

    def touch(self, node: Node) -> None:
        """Make an unused node whose ancestors are all in use the last to be evicted."""
        if node.num_users == 0:
            self.unused.move_to_end(node)

    def evict(self) -> int:
        """Forget the least recently used leaf and return its block id."""
        node, _ = self.unused.popitem(last=False)
        assert node.parent is not None and not node.children
        del node.parent.children[node.key]
        return node.block_id

    def nodes(self) -> list[Node]:
        """Every node but the root, parents before children."""
        found = [self.root]
        for node in found:
            found.extend(node.children.values())
        return found[1:]


def _common_prefix_len(key: tuple[int, ...], rest: Row[int]) -> int:
    for index, (ours, theirs) in enumerate(zip(key, rest, strict=False)):
        if ours != theirs:
            return index
    return min(len(key), len(rest))
