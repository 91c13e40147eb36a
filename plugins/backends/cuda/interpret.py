"""Runs launches of Triton kernels on CPU tensors, in Triton's interpreter.

Triton chooses between compiling and interpreting when a function is defined, by an environment
variable. Tests need both in one process, so this module interprets functions that were defined for
compiling: while launches run, a call of a Triton function, whether the kernel's own helper or the
language's (`tl.sum`), goes to an interpreted copy, and afterwards everything that the interpreter
patched is put back.

Triton 3.6's interpreter truncates where the hardware rounds, loses the carry of a mantissa that
rounds up, and multiplies bfloat16 operands as if they were integers. Conversions and products are
therefore replaced with torch's. It also takes most of its time for types, which it makes and
compares anew for every operation, for patching the language at every function, and for checks of
overflow whose result it drops. Here the language's rules are asked once for operands of some types
(interpret_replay.py), the language is patched once per call, and nothing is checked in vain.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from llmctl.plugins.backends.cuda import interpret_types as types
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.sources import load_function


def run_launches(launches: Sequence[Launch]) -> None:
    """Execute every launch in order; arguments are CPU tensors and numbers.

    The constant PDL is False here: there is no other kernel to wait for.
    """
    for launch in launches:
        assert launch.spec.is_triton, f"{launch.spec.name} is CUDA C++: it needs a GPU"
    # outside, so that they are defined for compiling
    functions = [load_function(launch.spec.source) for launch in launches]
    with _interpreted():
        for launch, function in zip(launches, functions, strict=True):
            _run(launch, function)


def _run(launch: Launch, function: Any) -> None:
    from triton.runtime.interpreter import _implicit_cvt, interpreter_builder

    names = [name for name in function.arg_names if name not in launch.spec.constants]
    assert len(names) == len(launch.arguments), launch.spec.name
    for name, kind, value in zip(names, launch.spec.arguments, launch.arguments, strict=True):
        _check_argument(launch.spec.name, name, kind, value)
    values = {name: _implicit_cvt(v) for name, v in zip(names, launch.arguments, strict=True)}
    values |= launch.spec.constants
    if "PDL" in values:
        values["PDL"] = False
    interpreter_builder.set_grid_dim(*launch.grid)
    with warnings.catch_warnings():
        # a loop up to a run-time argument: the interpreter makes a number of an array of one
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)
        for place in product(*map(range, launch.grid)):
            interpreter_builder.set_grid_idx(*place)
            function(**values)


def _torch_dtype(kind: Any) -> torch.dtype:
    """The torch dtype of a Triton scalar type."""
    return next(dtype for dtype, name in _DTYPES.items() if name == f"*{kind.scalar}")


def _as_torch(data: Any, kind: Any) -> torch.Tensor:
    """A numpy array of the interpreter, whose narrow floats are stored as integers."""
    dtype = _torch_dtype(kind)
    bits = {1: np.uint8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.ascontiguousarray(data).view(bits)).view(dtype)


def _convert(data: Any, source: Any, target: Any, rounding: object) -> Any:
    """Round to nearest even; FP8 saturates, as the hardware's conversion does."""
    wide = _as_torch(data, source).float()
    dtype = _torch_dtype(target)
    if dtype == torch.float8_e4m3fn:
        wide = wide.clamp(-448.0, 448.0)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return wide.to(dtype).view(bits).numpy().view(unsigned).reshape(np.shape(data))


def _dot(self: Any, a: Any, b: Any, d: Any, precision: object, imprecise: object) -> Any:
    """d + a @ b in float32."""
    product = _as_torch(a.data, a.dtype).float() @ _as_torch(b.data, b.dtype).float()
    return type(d)(product.numpy() + d.data, d.dtype.scalar)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z rounded once: a product of two float32 is exact in float64. Of float64 only a
    product alone, whose z is 0."""
    kind = str(z.dtype.scalar)
    if kind == "fp64" and not np.any(z.data):
        return type(z)(x.data * y.data, z.dtype.scalar)
    assert kind == "fp32", f"fused multiply-add of {kind}"
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return type(z)(wide.astype(np.float32), z.dtype.scalar)


def _refuse_bfloat16(binary_op: Any) -> Any:
    def checked(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        assert str(lhs.dtype.scalar) not in ("bf16", "fp8e4nv"), (
            f"{op.__name__} of {lhs.dtype.scalar}: the interpreter would add bit patterns; "
            "convert to float32 first"
        )
        return binary_op(self, lhs, rhs, op)

    return checked


_DTYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def _check_argument(kernel: str, name: str, kind: str, value: object) -> None:
    """A tensor of another dtype would be read as it is here, but misread by the compiled kernel."""
    if isinstance(value, torch.Tensor):
        found = _DTYPES.get(value.dtype)
        assert found == kind, f"{kernel}: {name} is {value.dtype}, the spec says {kind}"
        assert value.data_ptr() % 16 == 0, f"{kernel}: {name} is not 16-byte aligned"
    else:
        wanted = float if kind == "fp32" else int
        assert isinstance(value, wanted), f"{kernel}: {name} is {value!r}, the spec says {kind}"


@cache
def _rewritten(function: Any) -> Any:
    """The interpreted copy, whose loops and assignments are the interpreter's."""
    from triton.runtime.interpreter import FunctionRewriter

    return FunctionRewriter(function).rewrite_ast()


@contextmanager
def _interpreted() -> Iterator[None]:
    """While the body runs, calls of compiled functions are interpreted."""
    import triton.language as tl
    from triton import knobs
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, _patch_lang
    from triton.runtime.jit import JITFunction

    patched = (
        *(tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, tl.core.tuple),
        *(tl.core.tensor_descriptor_base, interpreter, InterpreterBuilder, TritonSemantic),
        interpreter.interpreter_builder,
    )
    before = [dict(vars(owner)) for owner in patched]
    compiled_call = JITFunction.__call__
    called: dict[object, Any] = {}
    languages: set[frozenset[str]] = set()  # which of them have been patched together

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in called:
            seen = frozenset(n.__name__ for n in self.fn.__globals__.values() if n in (tl, tl.core))
            if seen not in languages:
                _patch_lang(self.fn)
                languages.add(seen)
            called[self.fn] = _rewritten(self.fn)
        return called[self.fn](*args, **kwargs)

    dtypes: dict[str, Any] = {}
    dtype_of = interpreter._get_np_dtype

    def remembered_dtype(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = dtype_of(kind)
        return dtypes[kind.name]

    JITFunction.__call__ = call
    tl.block_type.__init__ = types.init_block_type
    tl.tensor.__init__ = types.init_tensor
    tl.core.tuple.__eq__ = types.have_same_values
    interpreter._get_np_dtype = remembered_dtype
    interpreter._patch_builtin = types.patch_builtin
    TritonSemantic.to_tensor = types.tensor_as_it_is(TritonSemantic.to_tensor)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._convert_float = _convert
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_fma = _fma
    InterpreterBuilder.binary_op = _refuse_bfloat16(InterpreterBuilder.binary_op)
    try:
        with knobs.runtime.scope():
            knobs.runtime.interpret = True  # functions of constants return plain numbers
            yield
    finally:
        JITFunction.__call__ = compiled_call
        for owner, attributes in zip(patched, before, strict=True):
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
