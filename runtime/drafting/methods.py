"""The table of draft methods, and the choice of one from the options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import BadConfig
from llmctl.runtime.api.field_types import as_type
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.draft_engine.options import ROW as DRAFT_ENGINE
from llmctl.runtime.drafting.draft_engine.tree import parse_tree
from llmctl.runtime.drafting.eagle.options import ROW as EAGLE
from llmctl.runtime.drafting.lookahead.options import ROW as LOOKAHEAD
from llmctl.runtime.drafting.medusa.options import ROW as MEDUSA
from llmctl.runtime.drafting.method import DraftMethod, FollowedMethod, MethodOption, MethodRow
from llmctl.runtime.drafting.ngram.options import ROW as NGRAM
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.redrafter.options import ROW as REDRAFTER

if TYPE_CHECKING:
    from llmctl.runtime.drafting.drafter import Described, FollowedDrafter
    from llmctl.runtime.engines.cuda_engine import CudaEngine

METHODS: tuple[MethodRow, ...] = (DRAFT_ENGINE, NGRAM, MEDUSA, REDRAFTER, EAGLE, LOOKAHEAD)


def method_options(methods: tuple[MethodRow, ...] = METHODS) -> list[MethodOption]:
    """Every method's options, in the order of the table."""
    return [option for row in methods for option in row.options]


def how_to_draft(methods: tuple[MethodRow, ...] = METHODS) -> str:
    """The options that request drafts, for hints in error messages."""
    return "add " + " or ".join(row.how for row in methods)


def as_method(draft: DraftMethod | Path | str | None, draft_tree: str | None = None) -> DraftMethod:
    """A method unchanged, an engine directory as a draft engine, None as plain decoding.
    draft_tree: of a draft engine. Raises BadConfig."""
    if isinstance(draft, (str, Path)):
        tree = None if draft_tree is None else parse_tree(draft_tree)
        return DraftEngine(as_type("draft", draft, Path), tree=tree)
    if draft_tree is not None:
        raise BadConfig(
            f"draft_tree is {draft_tree!r}, and draft is no folder of a draft engine",
            fix="give the folder as draft, or the tree to the draft method",
        )
    return PlainDecoding() if draft is None else draft


def follow(
    described: Described,
    engines: Mapping[str, CudaEngine],
    methods: tuple[MethodRow, ...] = METHODS,
) -> FollowedDrafter:
    """The drafter of another rank, on its engines by role, of what rank 0's says of itself."""
    rows = [row.followed for row in methods if row.followed is not None]
    known: list[type[FollowedMethod]] = [PlainDecoding, *rows]
    by_name = {method.name: method for method in known}
    return by_name[described["method"]].follow(described, engines)


def choose_method(
    values: Mapping[str, Any],
    draft_len: int | None = None,
    methods: tuple[MethodRow, ...] = METHODS,
) -> DraftMethod:
    """The method that the values of `method_options` request; plain decoding if there is none.

    Raises BadConfig for malformed or contradicting values, Unsupported for another device than 0.
    """
    if draft_len is not None and draft_len < 1:
        raise BadConfig(f"--draft-len is {draft_len}; it must be at least 1")
    chosen = [(row, found) for row in methods if (found := row.make(values, draft_len)) is not None]
    if len(chosen) > 1:
        given = [row.how.split()[0] for row, _ in chosen]
        raise BadConfig(f"{' and '.join(given)} are both given; one method drafts at a time")
    if chosen:
        return chosen[0][1]
    if draft_len is not None:
        raise BadConfig("--draft-len is given without a draft", fix=how_to_draft(methods))
    return PlainDecoding()
