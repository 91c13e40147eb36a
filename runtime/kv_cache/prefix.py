"""The longest cached prefix of a sequence's tokens, and how much of it can be used."""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import NamedTuple

from llmctl.runtime.kv_cache.radix_tree import Node, RadixTree, path_to
from llmctl.runtime.kv_cache.store import BlockStore


class PrefixMatch(NamedTuple):
    """A cached prefix of a sequence's tokens: `full` ends the path of shared full blocks."""

    full: Node
    partial: Node | None  # a child of `full` that agrees on its first num_partial_tokens
    num_partial_tokens: int
    num_blocks_in_use: int  # full blocks that other sequences hold now: they cost no free block


class Groups(NamedTuple):
    """Tokens before `context_end` are computed in whole groups of `size` tokens."""

    context_end: int = 0
    size: int = 0

    def last(self, node: Node, tokens_per_block: int) -> Node:
        """The deepest node on the path down to `node` behind which a sequence may go on."""
        if node.depth * tokens_per_block < self.context_end:
            while node.depth * tokens_per_block % self.size:
                assert node.parent is not None
                node = node.parent
        return node


NO_GROUPS = Groups()


def find_prefix(
    tree: RadixTree,
    tokens: Row[int],
    tokens_per_block: int,
    groups: Groups = NO_GROUPS,
    *,
    with_partial: bool,
) -> PrefixMatch:
    """The longest cached prefix of `tokens`. The last token is never part of it: its logits are
    needed, so it has to be computed."""
    limit = len(tokens) - 1
    found = tree.longest_match(tokens, limit, groups.context_end)
    full = groups.last(found, tokens_per_block)
    start = full.depth * tokens_per_block
    partial, num_partial_tokens = None, 0
    if with_partial and start >= groups.context_end:
        rest = tokens[start : min(start + tokens_per_block, limit)]
        partial, num_partial_tokens = tree.partial_match(full, rest)
    node = full  # the number of users only increases towards the root
    while node.parent is not None and node.num_users == 0:
        node = node.parent
    return PrefixMatch(full, partial, num_partial_tokens, node.depth)


def within_reach(store: BlockStore, full: Node) -> Node:
    """The deepest node on the path for whose blocks in host memory there is room on the device."""
    path = path_to(full)
    num_unused = sum(node.is_on_device and node.num_users == 0 for node in path)
    num_in_host = sum(not node.is_on_device for node in path)
    excess = num_in_host - (store.num_available - num_unused)
    while excess > 0 and num_in_host > 0 and full.parent is not None:
        full = full.parent
        excess -= 1
        num_in_host -= 1
    return full
