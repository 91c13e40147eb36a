"""The trees that a draft engine drafts: --draft-tree "depth,branch,nodes[,followed]"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmctl.errors import BadConfig
from llmctl.runtime.api import refused
from llmctl.runtime.api.field_types import check_types

OPTION = "--draft-tree"
_LARGEST = 1024  # of each number


@refused.refuses()
@dataclass(frozen=True, slots=True)
class DraftTree:
    """The likeliest `nodes` drafts, of which a path has at most `depth`; each is followed by the
    `branch` likeliest tokens, and of a level `followed` drafts are followed further, None: as many
    as `branch`. Raises BadConfig where there is no such tree."""

    depth: int
    branch: int
    nodes: int
    followed: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        numbers = (self.depth, self.branch, self.nodes, self.width)
        if not all(1 <= number <= _LARGEST for number in numbers):
            raise BadConfig(f"{OPTION} {self}: numbers from 1 to {_LARGEST} are wanted")
        if self.depth > self.nodes:
            raise BadConfig(f"{OPTION} {self}: {self.nodes} drafts have no path of {self.depth}")
        most = self.branch + (self.depth - 1) * self.branch * self.width
        if self.nodes > most:
            raise BadConfig(
                f"{OPTION} {self}: such a tree has at most {most} drafts",
                fix=f"use {most}, or a deeper or wider tree",
            )

    @property
    def width(self) -> int:
        """Drafts of a level that are followed further."""
        return self.branch if self.followed is None else self.followed

    def __str__(self) -> str:
        more = "" if self.followed is None else f",{self.followed}"
        return f"{self.depth},{self.branch},{self.nodes}{more}"


def parse_tree(text: str) -> DraftTree:
    """ "5,3,16" or "12,2,24,1". Raises BadConfig where it is no tree."""
    parts = str(text).strip().removeprefix("[").removesuffix("]").split(",")
    numbers = [int(part) for part in parts if re.fullmatch("[0-9]{1,4}", part.strip())]
    if len(parts) not in (3, 4) or len(numbers) != len(parts):
        raise BadConfig(
            f'{OPTION} is {text!r}; "depth,branch,nodes" is wanted, such as 5,3,16, or '
            '"depth,branch,nodes,followed"'
        )
    return DraftTree(*numbers)
