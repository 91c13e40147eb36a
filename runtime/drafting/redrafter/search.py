"""Searches for drafts by a recurrent head: step by step, or in one call where an engine has it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES
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

    def search(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> list[Found]:
        """The tree of each."""


class StepSearch:
    """Runs a head step by step, and chooses and merges beams on the host."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.num_steps = 0

    def search(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> list[Found]:
        """See Searcher."""
        rows, roots, lengths, rooms = zip(*asked, strict=True)
        found = search(self._head, rows, roots, lengths, num_beams, bounds)
        self.num_steps = max(beams.tokens.shape[1] for beams in found)
        return [merge_scored(beams, room) for beams, room in zip(found, rooms, strict=True)]


class CompiledSearch:
    """The same by compiled code, to the bit."""

    def __init__(self, compiled: CpuBeamSearch) -> None:
        self._compiled = compiled
        self.num_steps = 0

    def search(self, asked: Items[Asked], num_beams: int, bounds: Bounds) -> list[Found]:
        """See Searcher."""
        rows, roots, lengths, rooms = zip(*asked, strict=True)
        least = (bounds.least_kept, bounds.least_continued)
        trees = self._compiled.run(rows, roots, lengths, rooms, num_beams, *least)
        self.num_steps = trees.num_steps
        parts = (trees.tokens, trees.parents, trees.scores, trees.counts)
        return [
            Found(Drafts.of(tokens[:count], parents[:count]), scores[:count])
            for tokens, parents, scores, count in zip(*(p.tolist() for p in parts), strict=True)
        ]


def searcher_of(engine: Engine) -> Searcher:
    """The fastest that the engine has."""
    compiled = engine.compiled_search(REDRAFTER_FIRST, REDRAFTER_NEXT, REDRAFTER_STATES)
    return StepSearch(EngineHead(engine)) if compiled is None else CompiledSearch(compiled)
