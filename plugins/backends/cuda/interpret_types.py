"""What Triton's interpreter asks of types, remembered.

It takes most of its time for types, which it makes and compares anew for every operation, and for
calls around calls. interpret.py puts these in place while launches run; no value differs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any


@cache
def _block_of(shape: tuple[int, ...], element: str) -> tuple[Any, int, str]:
    """Shape, number of elements and name of a block type."""
    from triton.language import core

    assert shape, "a block has a dimension"
    return core.tuple(shape), core.validate_block_shape(shape), f"<{shape}, {element}>"


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    sizes = tuple(getattr(size, "value", size) for size in shape)
    self.shape, self.numel, self.name = _block_of(sizes, element_ty.name)


def have_same_values(self: Any, other: Any) -> Any:
    """Of one of the language's tuples and another sequence."""
    from triton.language import constexpr

    return constexpr(self.values == [getattr(value, "value", value) for value in other])


@cache
def _shape_of_tensors(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's shape and number of elements, as the language has them."""
    from triton.language import core

    return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    shape = tuple(type.shape) if type.is_block() else ()
    self.shape, self.numel = _shape_of_tensors(shape)


def _have_same_type(lhs: Any, rhs: Any) -> bool:
    """Of two tensors; a type's name says everything."""
    return bool(lhs.type.name == rhs.type.name)


def type_operands(find_types: Any) -> Any:
    """Operands as an operation needs them. Two of one type are returned as they are, which the
    language's rules of promotion come to as well; a number beside a block becomes one block."""
    from triton.language import tensor

    made: dict[tuple[object, ...], Any] = {}

    def typed(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        if not isinstance(lhs, tensor) or lhs.dtype.is_ptr() or named:
            return find_types(self, lhs, rhs, *flags, **named)
        if isinstance(rhs, tensor):
            # the fourth flag is for quotients, whose type may be another
            is_typed = len(flags) < 4 and _have_same_type(lhs, rhs)
            return (lhs, rhs) if is_typed else find_types(self, lhs, rhs, *flags)
        key = (lhs.type.name, type(rhs), rhs, flags)
        if key in made:
            return lhs, made[key]
        found = find_types(self, lhs, rhs, *flags)
        if found[0] is lhs:
            made[key] = found[1]
        return found

    return typed


def broadcast_operands(broadcast: Any) -> Any:
    """Two operands of one shape and type are so already."""

    def found(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if _have_same_type(lhs, rhs) else broadcast(self, lhs, rhs)

    return found


def once_per_value(make: Any) -> Any:
    """A method whose result depends on types, known by their names, and numbers alone."""
    made: dict[tuple[object, ...], Any] = {}

    def remembered(self: Any, *args: Any, **named: Any) -> Any:
        values = (*args, *named.values())
        key = tuple((type(value), getattr(value, "name", value)) for value in values)
        if key not in made:
            made[key] = make(self, *args, **named)
        return made[key]

    return remembered


def patch_attr(owner: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    """As the interpreter's own, with one call less for each operation."""
    from triton.language.semantic import TritonSemantic

    semantic = TritonSemantic(builder)
    function = getattr(member, "__wrapped__", member)  # without the check that this is a kernel

    def interpreted(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    scope.set_attr(owner, name, interpreted)
