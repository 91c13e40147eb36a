"""How the drafts of one sequence grow in a round, level by level, from what rows of logits offer.

A draft that others are to follow is expanded: a head or a draft engine computes its row, which
offers them. Its key then lies at a place behind the root of the tree, the last that is committed:

    places    0 | 1  2  3       root, then drafts that are expanded, none before its depth; a place
    tree      r | a  b  aa  ... is free again when its draft can no longer be among the best

Places are fewer than the drafts there is room for, so nobody needs more slots than the target.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.engine_format import MedusaTree
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.static_nodes import Nodes, first_nodes
from llmctl.runtime.request import Sequence

LEVELS = 8  # drafts of the longest path of a tree that grows freely: EAGLE's depth


@dataclass(slots=True, eq=False)
class Node:
    """A draft. score: the log-probability of its path; order: of nodes with equal scores the
    earlier is better."""

    token: int
    parent: Node | None  # None: it follows the root
    score: float
    order: int
    place: int = 0  # behind the root, of its key; 0: not expanded
    row: int = 0  # of the last step, if it was expanded there

    def line(self) -> list[Node]:
        """The nodes from the root's child to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the best first; a parent before its children."""
        return (-self.score, self.order)


class Growth(Protocol):
    """The drafts of one sequence in the making. `frontier` is expanded next; `row` is the root's
    row of the step that read it."""

    sequence: Sequence
    row: int
    frontier: list[Node]
    num_offers: int  # tokens that a row shall offer; 0: one that the sampler draws
    is_chain: bool  # whether those that are expanded follow one another, in places 1, 2, 3, ...

    def paths(self) -> list[list[int]]:
        """The places on the way to each of `frontier`: of the root's child first."""

    def take(self, tokens: Items[Items[int]], log_probs: Items[Items[float]]) -> None:
        """What the root's row offers, then those of `frontier`, the likeliest first."""

    def drafts(self) -> Drafts:
        """All of them, once `frontier` is empty."""

    def places(self, path: Items[int]) -> Items[int]:
        """Where the keys are of an accepted path of drafts, as far as they can be moved one after
        another to the places 1, 2, 3, ... without one overwriting a later one."""


class Chain:
    """One draft after another. is_plain: they are the likeliest tokens."""

    num_offers = 0
    is_chain = True

    def __init__(self, sequence: Sequence, row: int, length: int, *, is_plain: bool) -> None:
        self.sequence, self.row, self.is_plain = sequence, row, is_plain
        self.frontier: list[Node] = []
        self.tokens: list[int] = []
        # the distributions that they were drawn from, where they are asked for
        self.probs: list[NDArray[np.float64]] = []
        self._length, self._end = length, sequence.request.end_id
        self._last = [Node(0, None, 0.0, 0)]  # of `frontier`, as it follows row after row

    def paths(self) -> list[list[int]]:
        """One, in order."""
        return [list(range(1, 1 + len(self.tokens)))]

    def append(self, token: int) -> None:
        """The token that was drawn; nothing follows an end id."""
        (last,) = self._last
        if self.frontier:
            self.row = last.row
        self.tokens.append(token)
        last.token, last.place = token, len(self.tokens)
        is_done = last.place == self._length or token == self._end
        self.frontier = [] if is_done else self._last

    def take(self, tokens: Items[Items[int]], log_probs: Items[Items[float]]) -> None:
        """See Growth."""
        ((token,),) = tokens
        self.append(token)

    def drafts(self) -> Drafts:
        """A chain."""
        return Drafts(self.tokens, probs=np.stack(self.probs) if self.probs else None)

    def places(self, path: Items[int]) -> Items[int]:
        """Their own: nothing followed the last draft."""
        return range(1, 1 + min(len(path), len(self.tokens) - 1))


class Plant(Protocol):
    """Trees of one kind. depth: drafts of the longest path that a request may have."""

    @property
    def depth(self) -> int: ...
    def tree(self, sequence: Sequence, row: int, room: int) -> Growth:
        """One for at most `room` drafts; row: see Growth."""


@dataclass(frozen=True, slots=True)
class DynamicShape:
    """num_offers: children of a node; width: nodes of a level that are expanded; depth: drafts of
    the longest path."""

    num_offers: int
    width: int
    depth: int = LEVELS

    def tree(self, sequence: Sequence, row: int, room: int) -> DynamicTree:
        """See Plant."""
        return DynamicTree(sequence, row, room, self)


class DynamicTree:
    """The best paths of all that is offered (EAGLE-2): of each level's nodes the best are expanded,
    and of all nodes the best are drafted.

    A child is never better than its parent, so nodes that are not among the best now will not be,
    nor will theirs; and the last of the best has no child among them. Such nodes are not expanded.
    """

    def __init__(self, sequence: Sequence, row: int, room: int, shape: DynamicShape) -> None:
        self.sequence, self.row, self.num_offers = sequence, row, shape.num_offers
        self.frontier: list[Node] = []
        self._room, self._shape = room, shape
        self.is_chain = shape.width == 1
        self._best: list[Node] = []
        self._num_nodes = self._depth = 0

    def paths(self) -> list[list[int]]:
        """See Growth."""
        return [[node.place for node in leaf.line()] for leaf in self.frontier]

    def take(self, tokens: Items[Items[int]], log_probs: Items[Items[float]]) -> None:
        """See Growth."""
        fresh = self._follow(tokens, log_probs)
        self._depth += 1
        self._best = sorted([*self._best, *fresh], key=lambda node: node.rank)[: self._room]
        to_expand = set(map(id, fresh))
        expandable = self._best[: self._room - 1] if self._depth < self._shape.depth else []
        end = self.sequence.request.end_id
        self.frontier = [
            node for node in expandable if id(node) in to_expand and node.token != end
        ][: self._shape.width]
        for node in self._best[self._room - 1 :]:
            node.place = 0  # it is free for others
        held = {node.place for node in self._best}
        # No draft lies before its depth, so that an accepted path can always be moved there.
        free = [place for place in range(self._depth, self._room) if place not in held]
        del self.frontier[len(free) :]
        for node, place in zip(self.frontier, free, strict=False):
            node.place = place

    def drafts(self) -> Drafts:
        """See Growth."""
        return _as_drafts(self._drafted())

    def places(self, path: Items[int]) -> Items[int]:
        """See Growth."""
        return _places(self._drafted(), path)

    def _drafted(self) -> list[Node]:
        return sorted(self._best, key=lambda node: node.order)

    def _follow(self, tokens: Items[Items[int]], log_probs: Items[Items[float]]) -> list[Node]:
        fresh = []
        parents: Items[Node | None] = self.frontier or [None]
        for parent, own, values in zip(parents, tokens, log_probs, strict=True):
            for token, value in zip(own, values, strict=True):
                if value > float("-inf"):  # else outside the vocabulary that is drafted
                    score = min(value, 0.0) + (parent.score if parent else 0.0)
                    fresh.append(Node(token, parent, score, self._num_nodes))
                    self._num_nodes += 1
        return fresh


class StaticShape:
    """What a list of paths plants."""

    def __init__(self, choices: MedusaTree) -> None:
        self.depth = choices.depth
        self._nodes = cache(partial(first_nodes, choices))

    def tree(self, sequence: Sequence, row: int, room: int) -> StaticTree:
        """See Plant."""
        return StaticTree(sequence, row, self._nodes(room))


class StaticTree:
    """The tree of a list of paths: which of its parent's offers each draft is."""

    def __init__(self, sequence: Sequence, row: int, nodes: Nodes) -> None:
        self.sequence, self.row, self._shape = sequence, row, nodes
        self.frontier: list[Node] = []
        self.num_offers = 1 + max(nodes.ranks)
        self._nodes: dict[int, Node] = {}  # by index in the shape
        self._children: dict[int, list[int]] = {}
        for index, parent in enumerate(nodes.parents):
            self._children.setdefault(parent, []).append(index)
        self._expanded = [ROOT]  # indices of those whose rows were asked for last
        self._num_places = 0
        inner = [nodes.heads[index] for index in self._children if index != ROOT]
        self.is_chain = len(set(inner)) == len(inner)

    def paths(self) -> list[list[int]]:
        """See Growth."""
        return [[node.place for node in leaf.line()] for leaf in self.frontier]

    def take(self, tokens: Items[Items[int]], log_probs: Items[Items[float]]) -> None:
        """See Growth."""
        end, fresh = self.sequence.request.end_id, []
        for parent, own, values in zip(self._expanded, tokens, log_probs, strict=True):
            for index in self._children[parent]:
                rank = self._shape.ranks[index]
                if rank < len(own) and values[rank] > float("-inf"):
                    token = own[rank]
                    self._nodes[index] = Node(token, self._nodes.get(parent), 0.0, index)
                    fresh.append(index)
        self._expanded = [
            index
            for index in sorted(fresh)
            if index in self._children and self._nodes[index].token != end
        ]
        self.frontier = [self._nodes[index] for index in self._expanded]
        for node in self.frontier:
            self._num_places += 1
            node.place = self._num_places

    def drafts(self) -> Drafts:
        """See Growth."""
        return _as_drafts(self._drafted())

    def places(self, path: Items[int]) -> Items[int]:
        """See Growth."""
        return _places(self._drafted(), path)

    def _drafted(self) -> list[Node]:
        return [self._nodes[index] for index in sorted(self._nodes)]


def _as_drafts(nodes: list[Node]) -> Drafts:
    index = {id(node): place for place, node in enumerate(nodes)}
    parents = [ROOT if node.parent is None else index[id(node.parent)] for node in nodes]
    return Drafts.of([node.token for node in nodes], parents)


def _places(nodes: list[Node], path: Items[int]) -> list[int]:
    found: list[int] = []
    for index in path:
        if not nodes[index].place:  # no key
            break
        found.append(nodes[index].place)
    return found
