"""JSON as engines hold it: no key twice, no NaN or infinity, integers of 64 bits."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

MOST = 2**31 - 1  # of what is counted in 32 bits: positions, rows, slots, sizes of a tensor
_MOST_DIGITS = 20  # of an integer: 2**64 has 20
_SHOWN_CHARS = 80


def parse(text: str | bytes) -> Any:
    """The value. Raises ValueError (with a sentence for people) or RecursionError."""
    return json.loads(
        text,
        object_pairs_hook=_unique,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=_integer,
    )


def is_deeper(value: Any, most: int) -> bool:
    """Whether a value has lists and objects within one another to more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)  # of a hundred megabytes of keys in a second
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:_SHOWN_CHARS]!r} is there twice")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_MOST_DIGITS]} leaves 64 bits")
    return value


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS or not -(2**63) <= (value := int(text)) < 2**63:
        raise ValueError(f"{text[:_MOST_DIGITS]} leaves 64 bits")
    return value
