"""The one reader of JSON that others wrote: configs, headers, rows of data sets.

Python's own reader takes NaN, keeps the last of two equal keys and lets half of a surrogate pair
through; each would let a document mean something else here than where it was written.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

_SHOWN_CHARS = 80
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # a surrogate as JSON escapes it, paired or not
_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]")


def load_strict(data: str | bytes) -> Any:
    """The value of one JSON document. Raises ValueError (UnicodeDecodeError is one) for what is
    not JSON: also NaN, numbers beyond a double, repeated keys, half of a surrogate pair, and
    nesting too deep to read.
    """
    try:
        value = json.loads(
            data,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_repeats,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    pattern: Any = _SURROGATE if isinstance(data, str) else _SURROGATE_BYTES
    if pattern.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it holds half of a surrogate pair, which is no text") from error
    return value


def shown(value: object) -> str:
    """A value as Python writes it, for an error message: cut where it is long."""
    return clipped(ascii(value) if isinstance(value, str) else repr(value))


def clipped(text: str, most: int = _SHOWN_CHARS) -> str:
    """Somebody's words for an error message: cut after `most` characters, odd ones (halves of
    surrogate pairs among them) escaped."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= most else text[:most] + " …"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} does not fit a double")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {shown(repeated)} occurs twice")
    return unique
