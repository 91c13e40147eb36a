"""Searches for drafts by a recurrent head: step by step, or in one call where an engine has it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES
from llmctl.plugins.backends.cpu.beam_search import AskedBeams
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.redrafter.beams import Bounds, Head, search
from llmctl.runtime.drafting.redrafter.head import EngineHead
from llmctl.runtime.drafting.redrafter.packing import Found, merge_scored

if TYPE_CHECKING:
    from llmctl.plugins.backends.cpu.beam_search import CpuBeamSearch
    from llmctl.runtime.engines.engine import Engine


class Asked(NamedTuple):
    """A request that drafts are searched for. row: of the target's last step, that the root was
    drawn from; length: of its beams, at least 1; room: the most drafts."""

    row: int
    root: int
    length: int
    room: int


class Searcher(Protocol):
    """What searches, for all requests of a step at once. num_steps: of the head, last time."""

    num_steps: int

    def begin(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> None:
        """The target's last step is over, and this is likely to be searched next: it may be begun
        while the host has other work."""

    def search(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> list[Found]:
        """The tree of each. `bounds` may be those of `begin`, if that is what was begun."""

    def drop(self) -> None:
        """There is no search before the target's next step: what was begun is of no use."""


class StepSearch:
    """Runs a head step by step, and chooses and merges beams on the host."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.num_steps = 0

    def begin(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> None:
        """Nothing: its work is the host's. See Searcher, as for what follows."""

    def search(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> list[Found]:
        rows, roots, lengths, rooms = zip(*asked, strict=True)
        found = search(self._head, rows, roots, lengths, num_beams, bounds)
        self.num_steps = max(beams.tokens.shape[1] for beams in found)
        return [merge_scored(beams, room) for beams, room in zip(found, rooms, strict=True)]

    def drop(self) -> None:
        """Nothing was begun."""


class CompiledSearch:
    """The same by compiled code, to the bit, on a thread of the kernels if it is begun."""

    def __init__(self, compiled: CpuBeamSearch) -> None:
        self._compiled = compiled
        self._begun: tuple[Items[Asked], int] | None = None
        self.num_steps = 0

    def begin(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> None:
        """See Searcher, as for what follows."""
        self.drop()
        if self._compiled.begin(_query(asked, num_beams, bounds)):
            self._begun = (asked, num_beams)

    def search(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> list[Found]:
        if self._begun == (asked, num_beams):
            self._begun = None
            found = self._compiled.end()
        else:
            self.drop()
            found = self._compiled.run(_query(asked, num_beams, bounds))
        self.num_steps = self._compiled.num_steps
        return [Found(Drafts.of(tokens, parents), scores) for tokens, parents, scores in found]

    def drop(self) -> None:
        if self._begun is not None:
            self._begun = None
            self._compiled.end()


def searcher_of(engine: Engine) -> Searcher:
    """The fastest that the engine has."""
    compiled = engine.compiled_search(REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES)
    return StepSearch(EngineHead(engine)) if compiled is None else CompiledSearch(compiled)


def _query(asked: Items[Asked], num_beams: int, bounds: Bounds) -> AskedBeams:
    rows, roots, lengths, rooms = zip(*asked, strict=True)
    return AskedBeams(
        rows, roots, lengths, rooms, num_beams, bounds.least_kept, bounds.least_continued
    )
