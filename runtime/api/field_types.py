"""Types of what callers set in a request, checked where it is set.

Python stores whatever it is given, and a wrong type would be met in the middle of a step, whose
other requests fail with it. The annotations say what is wanted. Numbers of numpy are stored as
Python's, lists as tuples. Elements of token lists are checked where the vocabulary is known
(`check_token_ids`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from llmctl.errors import BadConfig


class _Field(NamedTuple):
    """exact: types whose values are stored as they are. convert: makes what is stored of another
    value, or raises TypeError."""

    name: str
    exact: frozenset[type]
    convert: Callable[[Any], object]
    wanted: str


def check_types(settings: Any) -> None:
    """Raise BadConfig for the first field of a dataclass with a value of another type than it says;
    called before anything compares the values."""
    cls: Any = type(settings)
    for name, exact, convert, wanted in _fields(cls):
        value = getattr(settings, name)
        if type(value) not in exact:
            try:
                object.__setattr__(settings, name, convert(value))
            except (TypeError, OverflowError):  # an integer too large for a number
                raise BadConfig(
                    f"{name} is {value!r:.80} ({type(value).__name__}); it must be {wanted}",
                    fix=f"set {name} of {cls.__name__} to a value that is {wanted}",
                ) from None


@cache
def _fields(cls: type) -> tuple[_Field, ...]:
    late: dict[str, Any] = {}
    if "lookahead_config" in cls.__annotations__:  # request.py does not import it to run
        from llmctl.builder.engine_format import LookaheadDecodingConfig

        late[LookaheadDecodingConfig.__name__] = LookaheadDecodingConfig
    return tuple(_field(name, hint) for name, hint in get_type_hints(cls, localns=late).items())


def _field(name: str, hint: Any) -> _Field:
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kind, *others = (option for option in options if option is not NoneType)
    assert not others, f"{name} may be of several types; one, or None, can be checked"
    origin = get_origin(kind) or kind
    exact: set[type] = {origin}
    convert: Callable[[Any], object] = partial(_instance, origin)
    wanted = f"of type {origin.__name__}"
    if origin is int:
        convert, wanted = _integer, "an integer"
    elif origin is float:
        convert, wanted = _number, "a number"
    elif origin is bool:
        wanted = "True or False"
    elif origin is tuple:
        element = get_args(kind)[0]
        if element is int:
            convert, wanted = _tuple, "a sequence of token ids"
        elif get_origin(element) is tuple:
            convert, wanted = _tuple, "a sequence of lists of token ids"
        else:
            exact, convert = set(), partial(_tuple_of, element)
            wanted = f"a sequence of {element.__name__}"
    if len(options) > 1:
        exact, wanted = {*exact, NoneType}, f"{wanted}, or None"
    return _Field(name, frozenset(exact), convert, wanted)


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


def _tuple_of(element: type, value: Any) -> tuple[Any, ...]:
    return tuple(_instance(element, item) for item in _tuple(value))


def _instance(cls: type, value: Any) -> Any:
    if not isinstance(value, cls):
        raise TypeError
    return value
