"""Cache groups: sets of KV layers that share a valid length per sequence.

All groups share one block table per sequence: a block id stands for the same tokens in each. Group
0 governs scheduling, and every block in the tree has its content; the other groups may lag behind.
A set of groups is a bit mask, bit g for group g.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmctl.runtime.kv_cache.radix_tree import Node

# A group that lacks at most so many of the committed tokens is up to date: a round in flight may
# be writing them.
KEPT_UP = 2


def publishable(lens: list[int], num_tokens: int) -> int:
    """How many of `num_tokens` committed tokens no step in flight writes any more, given the valid
    length of each group."""
    valid = lens[0]
    for length in lens:
        if num_tokens - KEPT_UP <= length < valid:
            valid = length
    return valid


def groups_with(lens: list[int], num_tokens: int) -> int:
    """The groups that have at least so many tokens."""
    return sum(1 << group for group, length in enumerate(lens) if length >= num_tokens)


def leading_blocks(path: Iterable[Node], num_groups: int) -> list[int]:
    """For each group, the leading blocks of a path that have its content."""
    counts, present = [0] * num_groups, (1 << num_groups) - 1
    for node in path:
        present &= node.groups
        for group in range(num_groups):
            counts[group] += present >> group & 1
    return counts


def mark_computed(tail: Node, num_blocks: int, group: int) -> None:
    """The first `num_blocks` blocks of the path down to `tail` have the group's content."""
    node, bit = tail, 1 << group
    while node.depth > num_blocks and node.parent is not None:
        node = node.parent
    while node.parent is not None and not node.groups & bit:
        node.groups |= bit
        node = node.parent


def change_over(lens: list[int], own: int, node: Node, start: int, end: int) -> None:
    """Adjust the valid lengths of a sequence when its block of tokens [start, end), which is full
    in the groups `own`, is replaced by the block of `node`: in the other groups only the content of
    `node` is valid."""
    for group, length in enumerate(lens):
        if not own >> group & 1:
            if not node.groups >> group & 1:
                lens[group] = min(length, start)
            elif length >= start:
                lens[group] = end
