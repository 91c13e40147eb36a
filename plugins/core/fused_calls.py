"""A record in a plan: a range of calls that one launch may replace. Separate from calls.py, so that
reading a plan does not import numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusedCalls:
    """Calls [start, stop) of a program that one launch of `kernel` replaces in some steps."""

    start: int
    stop: int
    kernel: str
