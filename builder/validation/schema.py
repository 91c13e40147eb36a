"""Types of a plan, from the annotations of its classes: what JSON gave for each field.

Every class is compiled once into a function that returns None, or where a value is wrong and how;
a plan of 80 layers has 20,000 values. bool is no int, and an int no float but among attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from llmctl.errors import CorruptEngine

Check = Callable[[Any], str | None]
_SCALARS = (int, float, str, bool, type(None))
_JSON = frozenset((*_SCALARS, list, dict))


def check_types(value: Any, name: str) -> None:
    """Raise CorruptEngine where a field of a dataclass is not what its annotation says."""
    kind: Any = type(value)
    found = _compile(kind)(value)
    if found is not None:
        raise CorruptEngine(f"{name}{found}", fix="build the engine again")


@cache
def _compile(kind: Any) -> Check:
    if is_dataclass(kind):
        return _record(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        assert arguments[1:] == (...,), f"only tuples of any length are in plans, not {kind}"
        return _sequence(arguments[0])
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[1])
    if origin is Literal:
        return _choice(arguments)
    return _scalar(kind)


def _scalar(kind: Any) -> Check:
    """One of some types; Any is what JSON holds."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    allowed = _JSON if Any in options else frozenset(options)
    assert allowed <= _JSON, f"{kind} is not in plans"
    names = " or ".join(getattr(option, "__name__", "a value") for option in options)

    def check(value: Any) -> str | None:
        return None if type(value) in allowed else f" is {shown(value)}; {names} is wanted"

    # Lists compare the types of all their values with it at once. An object with __call__ would be
    # typed as it is, but takes twice as long to call, and a plan has 20,000 values.
    check.allowed = allowed  # type: ignore[attr-defined]  # functions have no declared attributes
    return check


def _choice(options: tuple[Any, ...]) -> Check:
    wanted = " or ".join(map(repr, options))

    def check(value: Any) -> str | None:
        is_one = type(value) is str and value in options
        return None if is_one else f" is {shown(value)}; {wanted} is wanted"

    return check


def _sequence(kind: Any) -> Check:
    each = _compile(kind)
    allowed = getattr(each, "allowed", None)

    def check(value: Any) -> str | None:
        if type(value) is not tuple:
            return f" is {shown(value)}; a list is wanted"
        if allowed is not None and allowed.issuperset(map(type, value)):
            return None
        for index, item in enumerate(value):
            if found := each(item):
                return f"[{index}]{found}"
        return None

    return check


def _mapping(kind: Any) -> Check:
    each = _compile(kind)
    allowed = getattr(each, "allowed", None)

    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return f" is {shown(value)}; an object is wanted"
        if allowed is not None and allowed.issuperset(map(type, value.values())):
            return None
        for key, item in value.items():
            if found := each(item):
                return f"[{key!r}]{found}"
        return None

    return check


def _record(kind: Any) -> Check:
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)]
    checks = [_compile(hints[name]) for name in names]
    take = attrgetter(*names)
    # most fields are scalars: their types together are looked at once for each combination
    held = [index for index, each in enumerate(checks) if not hasattr(each, "allowed")]
    known: set[tuple[type, ...]] = set()

    def check(value: Any) -> str | None:
        if type(value) is not kind:
            return f" is {shown(value)}; {kind.__name__} is wanted"
        items = take(value)
        types = tuple(map(type, items))
        for index in held if types in known else range(len(items)):
            if found := checks[index](items[index]):
                return f".{names[index]}{found}"
        known.add(types)
        return None

    return check


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
