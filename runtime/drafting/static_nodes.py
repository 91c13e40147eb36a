"""The nodes of a static tree that a request has room for, in the order in which drafts go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.builder.engine_format import MedusaTree
from llmctl.runtime.drafting.drafts import ROOT, is_chain


@dataclass(frozen=True, slots=True)
class Nodes:
    """Some of a tree's nodes, parents before their children, as three lists of one length."""

    parents: list[int]  # as `Drafts.parents`
    heads: list[int]  # the head that drafts it: its depth - 1
    ranks: list[int]  # which of that head's tokens, 0: the likeliest

    @property
    def depth(self) -> int:
        """The most of them that one round can accept."""
        return 1 + max(self.heads, default=-1)

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before."""
        return is_chain(self.parents)


def first_nodes(tree: MedusaTree, count: int) -> Nodes:
    """The first `count` nodes of a tree, or all where there are fewer."""
    return _nodes(sorted(tree.paths[:count], key=lambda path: (len(path), path)))


def listed_nodes(tree: MedusaTree, count: int) -> Nodes:
    """The same nodes in the tree's own order: the first of them are the most useful ones, too."""
    return _nodes(tree.paths[:count])


def _nodes(ordered: Sequence[tuple[int, ...]]) -> Nodes:
    indexes = {path: index for index, path in enumerate(ordered)}
    return Nodes(
        parents=[indexes[path[:-1]] if len(path) > 1 else ROOT for path in ordered],
        heads=[len(path) - 1 for path in ordered],
        ranks=[path[-1] for path in ordered],
    )
