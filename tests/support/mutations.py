"""Changes to JSON documents by path, for tests of what is refused: delete, retype, extremes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]
EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, -(2**63), 2**64, 10**18, 10**40, 0.5, -1.5, 1e-300, 1e308,
    "", "x", "128", "false", "\x00", [], [1], ["x"], [[]], [None], {}, {"a": 1}, [0] * 10_000,
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change: the value at `path` deleted, or replaced by `value`."""

    path: Path
    is_deleted: bool
    value: Any
    before: Any

    @property
    def is_retyped(self) -> bool:
        """Whether the value has another JSON type now; null, and an integer in place of a
        fraction, do not count."""
        if self.is_deleted or self.value is None:
            return False
        kinds = (type(self.before), type(self.value))
        return kinds[0] is not kinds[1] and kinds != (float, int)

    def apply(self, document: Any) -> Any:
        """A changed copy of the document."""
        changed = copy.deepcopy(document)
        parent = changed
        for step in self.path[:-1]:
            parent = parent[step]
        if self.is_deleted:
            del parent[self.path[-1]]
        else:
            parent[self.path[-1]] = self.value
        return changed


def paths(document: Any, above: Path = ()) -> Iterator[Path]:
    """Every place of a document below its root."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*above, key))


def mutations(document: Any) -> st.SearchStrategy[Mutation]:
    """One mutation of a document."""
    places = list(paths(document))

    def at(path: Path) -> st.SearchStrategy[Mutation]:
        before = document
        for step in path:
            before = before[step]
        deleted = st.just(Mutation(path, True, None, before))
        replaced = st.sampled_from(EXTREMES).map(lambda value: Mutation(path, False, value, before))
        return st.one_of(deleted, replaced, replaced, replaced)

    return st.sampled_from(places).flatmap(at)
