"""Static trees: which of each head's likeliest tokens are drafted, and after which.

A path says how a node is reached: [0, 2] is the third likeliest token of head 1 after the likeliest
one of head 0. Head 0 says what follows the token that the target has just chosen, the root.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmctl.builder.heads.medusa.published import DEFAULT as DEFAULT
from llmctl.builder.heads.medusa.published import PUBLISHED
from llmctl.errors import BadConfig

Path = tuple[int, ...]

GRAPH = "medusa"  # of the heads, beside an engine's base graph
OPTION = "--medusa-choices"
TOP_K = 10  # tokens that a head offers, as in the published trees
FORM = "a list of paths, such as [[0], [0, 0], [1]]"


def logits_name(head: int) -> str:
    """The output of GRAPH that one head gives."""
    return f"logits.{head}"


@dataclass(frozen=True, slots=True)
class MedusaTree:
    """All nodes of a tree, every parent before its children, in the order in which they matter:
    where there is room for fewer, the first ones are drafted."""

    paths: tuple[Path, ...]

    @staticmethod
    def of(paths: Iterable[Path]) -> MedusaTree:
        """The tree with these paths, and with what leads to them: [[0, 0, 1]] has three nodes."""
        nodes: dict[Path, None] = {}
        for path in paths:
            nodes.update({path[:length]: None for length in range(1, len(path) + 1)})
        return MedusaTree(tuple(nodes))

    @property
    def num_nodes(self) -> int:
        """Drafts of a round, without the root."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Heads that it takes: the most drafts that one round can accept."""
        return max(map(len, self.paths))

    def of_depth(self, depth: int) -> MedusaTree:
        """The nodes that so many heads can draft."""
        return MedusaTree(tuple(path for path in self.paths if len(path) <= depth))


def parse_choices(text: str, option: str = OPTION) -> MedusaTree:
    """The tree of an option: a published name, or a list of paths as TensorRT-LLM takes it.

    What leads to a path need not be listed. Raises BadConfig.
    """
    if text.strip() in PUBLISHED:
        return MedusaTree.of(PUBLISHED[text.strip()])
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list) or not value:
        first, *others = PUBLISHED
        raise BadConfig(
            f"{option} is {_short(text)}; it must be {FORM}, or one of {first} and {len(others)} "
            "other names",
            fix=f"the names are {', '.join(PUBLISHED)}",
        )
    return MedusaTree.of(check_paths(value, option))


def check_paths(value: Sequence[object], option: str = OPTION) -> list[Path]:
    """The paths of a list that may hold anything. Raises BadConfig."""
    paths: dict[Path, None] = {}
    for path in value:
        if not isinstance(path, list | tuple) or not path:
            raise BadConfig(f"{option} holds {_short(repr(path))}; it must be {FORM}")
        for rank in path:
            if type(rank) is not int or not 0 <= rank < TOP_K:
                raise BadConfig(
                    f"{option} holds the path {_short(repr(list(path)))}; every element is the rank"
                    f" of one of a head's {TOP_K} likeliest tokens, 0 to {TOP_K - 1}"
                )
        if tuple(path) in paths:
            raise BadConfig(f"{option} holds the path {list(path)} twice")
        paths[tuple(path)] = None
    return list(paths)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
