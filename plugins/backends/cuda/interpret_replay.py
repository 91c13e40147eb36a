"""Operations of Triton's interpreter, done again without the rules of the language.

The interpreter takes most of its time for deciding, at every operation, what the operands' types
make of it: which conversions, which broadcasts, which instruction. That depends on types and
constants alone. So the first call of one of the language's functions with operands of some types is
watched, and later calls with the same types do the instructions that it came to, on values of their
own. What an instruction computes is as before; no value differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

Handle = Any  # triton.runtime.interpreter.TensorHandle
Recipe = Callable[[list[Handle]], Any]

# Instructions whose result is the same every time where no operand is a value.
_CONSTANT = ("get_", "create_splat", "create_broadcast", "create_make_range")
_WHOLE = slice(None)
_NOT_SEEN: Any = object()
_recipes: dict[tuple[Any, ...], Recipe | None] = {}  # None: a call that cannot be done again
_watching: list[Any] = []  # the semantic of the call that is watched, if any


class _Unknown(Exception):
    """An argument or a result that is neither a tensor nor a constant."""


def replayed(function: Any, semantic: Any) -> Any:
    """One of the language's functions, which asks `semantic` once for the same types."""
    from triton.language import core

    tensor = core.tensor

    def interpreted(*args: Any, **named: Any) -> Any:
        named.pop("_semantic", None)
        if _watching:  # part of a call that is
            return function(*args, **named, _semantic=_watching[-1])
        parts: list[Any] = [function]
        handles: list[Handle] = []
        try:
            for arg in args:
                if type(arg) is tensor:
                    parts.append(_type_of(arg))
                    handles.append(arg.handle)
                else:
                    parts.append(_key_of(arg, handles, core))
            for name, arg in named.items():
                parts.append((name, _key_of(arg, handles, core)))
        except _Unknown:
            return function(*args, **named, _semantic=semantic)
        key = tuple(parts)
        recipe = _recipes.get(key, _NOT_SEEN)
        if recipe is None:
            return function(*args, **named, _semantic=semantic)
        if recipe is _NOT_SEEN:
            result, _recipes[key] = _watch(function, semantic, args, named)
            return result
        return recipe(handles)

    return interpreted


def _type_of(x: Any) -> Any:  # also the handle's: comparisons give handles of what they compare
    return x.type.name, getattr(x.handle.dtype, "name", None)


def _key_of(value: Any, handles: list[Handle], core: Any) -> Any:
    """What an operation may ask of an argument; the handles of tensors in it are appended."""
    kind = type(value)
    if kind is int or kind is bool or kind is str or value is None:
        return kind, value
    if kind is core.constexpr:
        return kind, _key_of(value.value, handles, core)
    if kind is core.tensor:
        handles.append(value.handle)
        return _type_of(value)
    if kind is float:  # -0.0 equals 0.0, and NaN nothing
        return kind, value.hex()
    if kind is core.dtype:
        return kind, value.name
    if kind is tuple or kind is list or kind is core.tuple:
        return kind, *[_key_of(item, handles, core) for item in value]
    if kind is slice and value == _WHOLE:
        return slice
    if isinstance(value, Enum) or kind.__module__.endswith("libtriton.ir"):
        return kind, value
    raise _Unknown


def _watch(function: Any, semantic: Any, args: Any, named: Any) -> tuple[Any, Recipe | None]:
    """The result of a call, and how to do it again."""
    watch = _Watch(semantic.builder)
    copies = [watch.copied(arg) for arg in args]
    named_copies = {name: watch.copied(arg) for name, arg in named.items()}
    watch.num_inputs = len(watch.values)
    _watching.append(type(semantic)(watch))
    try:
        result = function(*copies, **named_copies, _semantic=_watching[-1])
    finally:
        _watching.pop()
    try:
        return result, watch.recipe(result)
    except _Unknown:
        return result, None


class _Watch:
    """A builder that does what the interpreter's does, and notes it.

    Values are numbered: the arguments' handles, then constants and results as they come.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.values: list[Any] = []  # constants stay in here
        self.num_inputs = 0
        self._numbers: dict[int, int] = {}  # by id
        self._constants: set[int] = set()
        self._steps: list[tuple[Any, tuple[int, ...], int]] = []  # function, operands, result
        self._is_known = True

    def copied(self, value: Any) -> Any:
        """An argument with handles of its own, so that x * x is a product of two."""
        from triton.language import core

        if isinstance(value, core.tensor):
            handle = value.handle
            made = object.__new__(type(handle))
            made.__dict__.update(handle.__dict__)
            self._number(made)
            return core.tensor(made, value.type)
        if type(value) in (tuple, list, core.tuple):
            return type(value)([self.copied(item) for item in value])
        return value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found):
            return found

        def noted(*args: Any, **named: Any) -> Any:
            line = _OneLine(self._builder)
            # those that are one line of Triton's source call nothing but methods of `line`
            is_line = getattr(found, "__name__", "") == "<lambda>"
            result = found.__func__(line, *args) if is_line and not named else found(*args, **named)
            if name.startswith("create_") or _is_handle(result):
                self._note(name, line.function or found, args, named, result)
            return result

        return noted

    def _number(self, value: Any) -> int:
        self.values.append(value)
        self._numbers[id(value)] = len(self.values) - 1
        return len(self.values) - 1

    def _operand(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            # A handle must come from somewhere, alone or in a list.
            self._is_known &= not any(map(_is_handle, value if _is_list(value) else [value]))
            number = self._number(value)
            self._constants.add(number)
        return number

    def _note(self, name: str, function: Any, args: Any, named: Any, result: Any) -> None:
        operands = tuple(map(self._operand, args))
        self._is_known &= not named and not _is_list(result)
        number = self._number(result)
        if name.startswith(_CONSTANT) and self._constants.issuperset(operands):
            self._constants.add(number)
        else:
            self._steps.append((function, operands, number))

    def recipe(self, result: Any) -> Recipe:
        """The steps, for other values of the arguments."""
        from triton.language import core

        if not self._is_known:
            raise _Unknown
        finish = self._finish(result, core)
        made = {number for *_, number in self._steps}
        blank = [
            None if number < self.num_inputs or number in made else value
            for number, value in enumerate(self.values)
        ]
        steps, count = self._steps, self.num_inputs
        if len(steps) == 1 and isinstance(result, core.tensor):
            (function, operands, number) = steps[0]
            if self._numbers.get(id(result.handle)) == number:
                return _one_step(function, operands, count, blank, _typed(result))

        def run(handles: list[Handle]) -> Any:
            values = blank.copy()
            values[:count] = handles
            for function, operands, number in steps:
                values[number] = function(*[values[operand] for operand in operands])
            return finish(values)

        return run

    def _finish(self, result: Any, core: Any) -> Callable[[list[Any]], Any]:
        """What makes the result of values."""
        if isinstance(result, core.tensor):
            number = self._numbers.get(id(result.handle))
            if number is None:
                raise _Unknown
            make = _typed(result)
            return lambda values: make(values[number])
        if _is_list(result):
            kind, parts = type(result), [self._finish(item, core) for item in result]
            return lambda values: kind([part(values) for part in parts])
        if result is None or type(result) in (int, bool, core.constexpr, core.dtype):
            return lambda values: result
        raise _Unknown


def _is_handle(value: Any) -> bool:
    return type(value).__name__.endswith("Handle")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _typed(like: Any) -> Callable[[Handle], Any]:
    """What makes tensors of one type."""
    kind, attributes = type(like), {**vars(like)}

    def make(handle: Handle) -> Any:
        made = object.__new__(kind)
        made.__dict__.update(attributes)
        made.handle = handle
        return made

    return make


def _one_step(
    function: Any, operands: tuple[int, ...], count: int, values: list[Any], make: Any
) -> Recipe:
    """The most frequent recipes: one instruction with one operand or two."""
    if operands == (0, 1) and count == 2:
        return lambda handles: make(function(*handles))
    if len(operands) == 2 and operands[0] == 0 and operands[1] >= count:
        other = values[operands[1]]
        return lambda handles: make(function(handles[0], other))

    def run(handles: list[Handle]) -> Any:
        own = [handles[n] if n < count else values[n] for n in operands]
        return make(function(*own))

    return run


class _OneLine:
    """Stands for the builder in an instruction that hands numpy's function on to a method."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.function: Any = None  # the instruction without the questions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def binary_op(self, lhs: Handle, rhs: Handle, operation: Any) -> Handle:
        result = self._builder.binary_op(lhs, rhs, operation)
        kind, dtype = result.dtype, _numpy_dtype(result.dtype)
        most, handle = dtype.itemsize, type(result)

        def run(lhs: Handle, rhs: Handle) -> Handle:
            data = operation(lhs.data, rhs.data)
            if data.itemsize > most:
                data = data.astype(dtype)
            made = object.__new__(handle)
            made.data, made.dtype, made.attr = data, kind, {}
            return made

        self.function = run
        return result

    def cast_impl(self, source: Handle, target: Any) -> Handle:
        result = self._builder.cast_impl(source, target)
        names = {str(source.dtype.scalar), str(target.scalar)}
        if names != {"bf16", "fp32"}:  # a conversion of numpy's
            kind, dtype, handle = result.dtype, _numpy_dtype(target), type(result)
            self.function = lambda source, _target, *_: handle(source.data.astype(dtype), kind)
        return result


def _numpy_dtype(kind: Any) -> np.dtype[Any]:
    from triton.runtime import interpreter

    found: np.dtype[Any] = interpreter._get_np_dtype(kind)
    return found
