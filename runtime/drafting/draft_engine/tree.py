"""The trees that a draft engine drafts: --draft-tree "depth,branch,nodes"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmctl.errors import BadConfig

OPTION = "--draft-tree"
_LARGEST = 1024  # of each number


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The likeliest `nodes` drafts, of which a path has at most `depth`; each is followed by the
    `branch` likeliest tokens, and of a level as many are followed further. Raises BadConfig where
    there is no such tree."""

    depth: int
    branch: int
    nodes: int

    def __post_init__(self) -> None:
        if not all(1 <= number <= _LARGEST for number in (self.depth, self.branch, self.nodes)):
            raise BadConfig(f"{OPTION} {self}: three numbers from 1 to {_LARGEST} are wanted")
        if self.depth > self.nodes:
            raise BadConfig(f"{OPTION} {self}: {self.nodes} drafts have no path of {self.depth}")
        most = self.branch + (self.depth - 1) * self.branch**2
        if self.nodes > most:
            raise BadConfig(
                f"{OPTION} {self}: a tree of depth {self.depth} and branch {self.branch} has at "
                f"most {most} drafts",
                fix=f"ask for {most}, or for a deeper or wider tree",
            )

    def __str__(self) -> str:
        return f"{self.depth},{self.branch},{self.nodes}"


def parse_tree(text: str) -> DraftTree:
    """ "5,3,16". Raises BadConfig where it is no tree."""
    parts = text.strip().removeprefix("[").removesuffix("]").split(",")
    numbers = [int(part) for part in parts if re.fullmatch("[0-9]{1,4}", part.strip())]
    if len(parts) != 3 or len(numbers) != 3:
        raise BadConfig(f'{OPTION} is {text!r}; "depth,branch,nodes" is wanted, such as 5,3,16')
    return DraftTree(*numbers)
