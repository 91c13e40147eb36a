"""A record of a plan: calls whose place one launch may take. Apart from calls.py, so that reading a
plan imports no arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusedCalls:
    """Calls [start, stop) of a program whose place one launch of `kernel` takes in some steps."""

    start: int
    stop: int
    kernel: str
