"""Values of a request's fields: BadConfig where one is of the wrong type or outside its range.

A value of another type would raise in some later step, and end every request of that step.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from operator import index
from typing import Any, NamedTuple

from llmctl.errors import BadConfig


def _float(value: Any) -> float:
    """Not of text, which `float` would read."""
    if isinstance(value, str | bytes):
        raise TypeError
    return float(value)


class _Number(NamedTuple):
    """A field that holds a number."""

    name: str
    kind: str
    is_optional: bool


# Whatever Python itself takes for such a number becomes one, numpy's included.
_KINDS = {"int": (index, "an integer"), "float": (_float, "a number")}


def require(condition: bool, name: str, found: object, wanted: str) -> None:
    """Raise BadConfig with name, value and what is wanted unless the condition holds."""
    if not condition:
        raise BadConfig(f"{name} is {found}; it must be {wanted}")


def make_numbers(config: Any) -> None:
    """Make the fields of a dataclass that are annotated as int or float numbers of Python, from
    numpy's and others. Raises BadConfig for a value that is none."""
    for name, kind, is_optional in _numbers(config.__class__):
        value = getattr(config, name)
        if type(value).__name__ in (kind, "int") or (value is None and is_optional):
            continue
        convert, wanted = _KINDS[kind]
        try:
            object.__setattr__(config, name, convert(value))
        except TypeError:
            raise BadConfig(f"{name} is {value!r:.80}; it must be {wanted}") from None


def require_instance(name: str, value: object, wanted: type) -> None:
    """Raise BadConfig where `value`, a field of that name, is of another class."""
    if not isinstance(value, wanted):
        raise BadConfig(f"{name} is {value!r:.80}; it must be of class {wanted.__name__}")


@cache
def _numbers(of: Any) -> tuple[_Number, ...]:
    found = []
    for field in fields(of):
        kind, _, rest = str(field.type).partition(" | ")
        if kind in _KINDS:
            found.append(_Number(field.name, kind, rest == "None"))
    return tuple(found)
