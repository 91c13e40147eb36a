"""Interpreting kernels beside compiling them: right roundings, nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton.language as tl
from support.cuda_samples import sample_triton
from support.cuda_samples.specs import NORM, PRODUCT
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from llmctl.plugins.backends.cuda import compiler, interpret, interpret_replay
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.interpret_types import builtins_of
from llmctl.plugins.backends.cuda.kernel_spec import Launch


def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float8_e4m3fn)
    run_launches([Launch(NORM, (len(x), 1, 1), (x, scale, out, len(x), 1e-6))])
    return out


def expected(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) / scale
    return y.clamp(-448, 448).to(torch.float8_e4m3fn)


def test_helpers_reductions_and_fp8_outputs_are_interpreted():
    x, scale = torch.randn(5, 256).bfloat16(), torch.tensor([0.01])
    found, wanted = normed(x, scale).float(), expected(x, scale).float()
    assert (found == wanted).float().mean() > 0.99  # another order of the sum may flip a rounding
    torch.testing.assert_close(found, wanted, rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float8_e4m3fn"])
def test_products_of_narrow_floats_are_exact_products(kind):
    dtype = getattr(torch, kind)
    a, b = torch.randn(64, 128).to(dtype), torch.randn(16, 128).to(dtype)
    out = torch.zeros(64, 16)
    types = {"bfloat16": "*bf16", "float16": "*fp16", "float8_e4m3fn": "*fp8e4nv"}
    spec = replace(PRODUCT, arguments=(types[kind], types[kind], "*fp32"))
    run_launches([Launch(spec, (1, 1, 1), (a, b, out))])
    torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-5, atol=1e-5)


def test_a_function_can_be_interpreted_then_compiled_then_interpreted(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_memo", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    x, scale = torch.randn(3, 256).half().bfloat16(), torch.tensor([1.0])
    first = normed(x, scale)
    before = {owner: dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, interpreter)}
    compiled = compile_kernel(NORM)
    assert compiled.registers > 0
    assert torch.equal(normed(x, scale).view(torch.uint8), first.view(torch.uint8))
    for owner, attributes in before.items():
        assert dict(vars(owner)) == attributes
    with pytest.raises(RuntimeError, match="outside of the scope"):
        sample_triton._square(1)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(5, 256), "x_ptr is torch.float32, the spec says"),
        (0, torch.zeros(2000).bfloat16()[1:1281].view(5, 256), "16-byte aligned"),
        (3, 1.5, "rows is 1.5"),
        (4, 1, "epsilon is 1"),
    ],
)
def test_an_argument_of_another_type_than_the_spec_says_is_a_bug(position, value, message):
    arguments = [torch.zeros(5, 256).bfloat16(), torch.ones(1), None, 5, 1e-6]
    arguments[2] = torch.zeros(5, 256, dtype=torch.float8_e4m3fn)
    arguments[position] = value
    with pytest.raises(AssertionError, match=message):
        run_launches([Launch(NORM, (5, 1, 1), tuple(arguments))])


OPERATIONS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__truediv__", "__floordiv__"),
    *("__mod__", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__neg__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)


def operand(kind: tl.dtype, shape: tuple[int, ...], value: int) -> tl.tensor:
    data = np.full(shape or (1,), value, interpreter._get_np_dtype(kind))
    handle = interpreter.TensorHandle(data, kind)
    return tl.tensor(handle, tl.block_type(kind, shape) if shape else kind)


def outcome(find, *args):
    try:
        found = find(*args)
    except Exception as error:
        return type(error)
    data = found.handle.data
    return found.type.name, data.dtype, data.shape, data.tobytes()


def test_operations_done_again_have_the_types_and_values_that_the_language_gives_them(monkeypatch):
    """Every pair of types, each with values of its own after those that were watched."""
    monkeypatch.setattr(interpret_replay, "_recipes", {})
    kinds = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    numbers = (0, 1, True, -1, 0.0, -0.0, 2.5, 1 << 40, float("inf"))
    types = [(kind, shape) for kind in kinds for shape in ((), (4,), (2, 4))]
    with interpret._interpreted(), np.errstate(all="ignore"):
        language = TritonSemantic(interpreter.interpreter_builder)
        for name in OPERATIONS:
            plain = partial(vars(tl.tensor)[name], _semantic=language)
            quick = builtins_of(tl.tensor)[name]
            for kind, shape in types:
                if name == "__neg__":
                    pairs = [[(operand(kind, shape, value),) for value in (3, 5)]]
                else:
                    pairs = [
                        [(operand(kind, shape, x), operand(*other, y)) for x, y in ((3, 2), (5, 7))]
                        for other in types
                    ] + [[(operand(kind, shape, x), number) for x in (3, 5)] for number in numbers]
                for first, second in pairs:
                    assert outcome(quick, *first) == outcome(plain, *first), (name, first)
                    assert outcome(quick, *second) == outcome(plain, *second), (name, second)
        assert None not in interpret_replay._recipes.values()
    assert len(interpret_replay._recipes) > 1000


def test_an_operand_that_comes_twice_is_two_operands(monkeypatch):
    monkeypatch.setattr(interpret_replay, "_recipes", {})
    with interpret._interpreted():
        product_of = builtins_of(tl.tensor)["__mul__"]
        x, y = (operand(tl.int32, (4,), value) for value in (3, 5))
        assert product_of(x, x).handle.data.tolist() == [9] * 4
        assert product_of(x, y).handle.data.tolist() == [15] * 4
        assert len(interpret_replay._recipes) == 1


def test_what_comparisons_made_keeps_the_type_of_what_was_compared(monkeypatch):
    """All are int1, but a scalar that is broadcast becomes numbers of its handle's type."""
    monkeypatch.setattr(interpret_replay, "_recipes", {})
    with interpret._interpreted():
        less, both = (builtins_of(tl.tensor)[name] for name in ("__lt__", "__and__"))
        for kind in (tl.float32, tl.int32):
            found = both(*(less(operand(kind, (), 3), operand(kind, (), n)) for n in (4, 5)))
            assert found.type == tl.int1 and found.handle.dtype == kind
