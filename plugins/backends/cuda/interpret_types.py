"""What Triton's interpreter asks of types, remembered.

It makes and compares types anew for every operation, and looks for the language's functions at
every patch. interpret.py puts these in place while launches run; no value differs.
"""

from __future__ import annotations

import math
from functools import cache
from inspect import getmembers
from typing import Any

from llmctl.plugins.backends.cuda.interpret_replay import replayed


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


def tensor_as_it_is(to_tensor: Any) -> Any:
    """Every assignment asks for a tensor, and mostly of one."""
    from triton.language import tensor

    def found(self: Any, value: Any, *rest: Any) -> Any:
        return value if type(value) is tensor else to_tensor(self, value, *rest)

    return found


@cache
def builtins_of(owner: Any) -> dict[str, Any]:
    """The language's functions in a module or a class, as the interpreter calls them."""
    from triton.language.core import is_builtin
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    semantic = TritonSemantic(interpreter_builder)
    return {
        # what is wrapped lacks the check that this is a kernel
        name: replayed(getattr(member, "__wrapped__", member), semantic)
        for name, member in getmembers(owner)
        if is_builtin(member)
    }


def patch_builtin(owner: Any, builder: object, scope: object) -> None:
    """As the interpreter's own, for what need not be looked for, or decided, every time."""
    for name, function in builtins_of(owner).items():
        setattr(owner, name, function)
