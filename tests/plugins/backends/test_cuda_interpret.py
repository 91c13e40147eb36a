"""Interpreting kernels beside compiling them: right roundings, nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import triton.language as tl
from support.cuda_samples import sample_triton
from support.cuda_samples.specs import NORM, PRODUCT
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from llmctl.plugins.backends.cuda import compiler, interpret
from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.interpret import run_launches
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


def test_operands_get_the_types_and_values_that_the_language_gives_them():
    """Also where they are taken as they are or remembered: every pair, asked for twice."""

    def operand(kind: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
        data = np.full(shape or (1,), 3, interpreter._get_np_dtype(kind))
        handle = interpreter.TensorHandle(data, kind)
        return tl.tensor(handle, tl.block_type(kind, shape) if shape else kind)

    def outcome(find, *args):
        try:
            found = find(*args)
        except Exception as error:
            return type(error)
        return [(one.type.name, one.handle.data.tolist(), one.handle.data.dtype) for one in found]

    original = dict(vars(TritonSemantic))
    kinds = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    numbers = (0, 1, True, -1, 0.0, -0.0, 2.5, 1 << 40, float("inf"))
    flags = ((), (True, True), (False, False, True, True), (False, False, False, True))
    with interpret._interpreted():
        replaced = {
            name: method
            for name, method in vars(TritonSemantic).items()
            if method is not original[name]
        }
        assert "scalar_constant" in replaced
        plain = type("Plain", (TritonSemantic,), {name: original[name] for name in replaced})
        language, quick = (
            kind(interpreter.interpreter_builder) for kind in (plain, TritonSemantic)
        )
        operands = [operand(kind, shape) for kind in kinds for shape in ((), (4,), (2, 4))]
        for lhs in operands:
            for rhs in (*operands, *numbers):
                for pair, flag in product(((lhs, rhs), (rhs, lhs)), flags):
                    wanted = outcome(language.binary_op_type_checking_impl, *pair, *flag)
                    for _ in range(2):
                        assert outcome(quick.binary_op_type_checking_impl, *pair, *flag) == wanted
