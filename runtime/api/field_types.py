"""Types of what callers set in a request, or of engines and executors, checked where it is set.

Python stores whatever it is given, and a wrong type would be met in the middle of a step, whose
other requests fail with it, or be taken for something else without a word. The annotations say
what is wanted. Numbers of numpy are stored as Python's, lists as tuples, names of paths as paths.
Elements of token lists are checked where the vocabulary is known (`check_token_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from functools import cache, partial
from importlib import import_module
from numbers import Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from llmctl.errors import BadConfig

Convert = Callable[[Any], object]


# Types whose modules are not imported by those that name them, which every --help imports.
_LATE = {
    "LookaheadDecodingConfig": "llmctl.builder.engine_format",
    "MedusaTree": "llmctl.builder.engine_format",
    "HeadAccuracy": "llmctl.runtime.drafting.medusa.accuracy",
}


class _Field(NamedTuple):
    """exact: types whose values are stored as they are. convert: makes what is stored of another
    value, or raises TypeError."""

    name: str
    exact: frozenset[type]
    convert: Convert
    wanted: str


def check_types(settings: Any, *, checks_integers: bool = False) -> None:
    """Raise BadConfig for the first field of a dataclass with a value of another type than it says;
    called before anything compares the values. checks_integers: also those in sequences, which are
    no token ids."""
    cls: Any = type(settings)
    for name, exact, convert, wanted in _fields(cls, checks_integers):
        value = getattr(settings, name)
        if type(value) not in exact:
            try:
                object.__setattr__(settings, name, convert(value))
            except (TypeError, OverflowError):  # an integer too large for a number
                raise BadConfig(
                    f"{name} is {value!r:.80} ({type(value).__name__}); it must be {wanted}",
                    fix=f"set {name} of {cls.__name__} to a value that is {wanted}",
                ) from None


def as_type(name: str, value: Any, hint: Any) -> Any:
    """An argument of a call as its type says, which is written as those of fields are; integers in
    sequences are checked. Raises BadConfig for a value of another type."""
    _, exact, convert, wanted = _argument(name, hint)
    if type(value) in exact:
        return value
    try:
        return convert(value)
    except (TypeError, OverflowError):
        raise BadConfig(
            f"{name} is {value!r:.80} ({type(value).__name__}); it must be {wanted}"
        ) from None


@cache
def _argument(name: str, hint: Any) -> _Field:
    return _field(name, hint, checks_integers=True)


@cache
def _fields(cls: type, checks_integers: bool) -> tuple[_Field, ...]:
    late = {
        name: getattr(import_module(module), name)
        for name, module in _LATE.items()
        if any(name in str(hint) for hint in cls.__annotations__.values())
    }
    hints = get_type_hints(cls, localns=late)
    own = (item.name for item in fields(cls) if item.init)
    return tuple(_field(name, hints[name], checks_integers) for name in own)


def _field(name: str, hint: Any, checks_integers: bool) -> _Field:
    """Of one type or a choice of several, which are tried in their order."""
    options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds = [_kind(option, checks_integers) for option in options if option is not NoneType]
    exact, converts = frozenset().union(*(kind[0] for kind in kinds)), [kind[1] for kind in kinds]
    wanted = ", or ".join(kind[2] for kind in kinds)
    if NoneType in options:
        exact, wanted = exact | {NoneType}, f"{wanted}, or None"
    convert = converts[0] if len(converts) == 1 else partial(_first_of, converts)
    return _Field(name, exact, convert, wanted)


def _kind(hint: Any, checks_integers: bool) -> tuple[frozenset[type], Convert, str]:
    """(exact, convert, wanted) of one type, as in _Field."""
    origin = get_origin(hint) or hint
    exact = frozenset({origin})
    if origin is int:
        return exact, _integer, "an integer"
    if origin is float:
        return exact, _number, "a number"
    if origin is bool:
        return exact, partial(_instance, bool), "True or False"
    if origin is Path:
        return exact, _path, "a path"
    if origin is Literal:
        values = get_args(hint)
        return frozenset(), partial(_one_of, values), " or ".join(map(repr, values))
    if origin is tuple:
        element = get_args(hint)[0]
        if element is int and checks_integers:
            return frozenset(), _integers, "a sequence of integers"
        if element is int:
            return exact, _tuple, "a sequence of token ids"
        if get_origin(element) is tuple:
            return frozenset(), _lists, "a sequence of lists of token ids"
        return frozenset(), partial(_tuple_of, element), f"a sequence of {element.__name__}"
    if isinstance(origin, type) and issubclass(origin, Enum):
        members = " or ".join(member.name for member in origin)
        return exact, partial(_instance, origin), f"a member of {origin.__name__} ({members})"
    return exact, partial(_instance, origin), f"of type {origin.__name__}"


def _first_of(converts: Sequence[Convert], value: Any) -> object:
    for convert in converts:
        with suppress(TypeError):
            return convert(value)
    raise TypeError


def _one_of(values: tuple[object, ...], value: Any) -> object:
    if not isinstance(value, str) or value not in values:
        raise TypeError
    return value


def _path(value: Any) -> Path:
    if value == "":  # of a variable that is not set; it would be the current folder
        raise TypeError
    return Path(value)  # raises TypeError for what is neither text nor a path


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | dict | set):
        raise TypeError
    return tuple(value)


def _lists(value: Any) -> tuple[tuple[Any, ...], ...]:
    """Words are compared with slices of tuples, which no list equals."""
    return tuple(word if type(word) is tuple else _tuple(word) for word in _tuple(value))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, _tuple(value)))


def _tuple_of(element: type, value: Any) -> tuple[Any, ...]:
    return tuple(_instance(element, item) for item in _tuple(value))


def _instance(cls: type, value: Any) -> Any:
    if not isinstance(value, cls):
        raise TypeError
    return value
