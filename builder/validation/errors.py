"""The one error of everything here."""

from __future__ import annotations

from llmctl.errors import CorruptEngine


def wrong(what: str) -> CorruptEngine:
    """`what` names the tensor, operator or field, what was found and what is wanted."""
    return CorruptEngine(what, fix="build the engine again")
