"""What holds for the kernels of every operator, over all cases of its spec."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec

import pytest
from kernel_support import KERNEL_DTYPES, disassemble, limits_for

from llmctl.errors import Unsupported
from llmctl.plugins.cuda.compiler import compile_kernel
from llmctl.plugins.cuda.kernel import KernelSpec
from llmctl.plugins.examples import make_example
from llmctl.plugins.spec import FP8
from llmctl.plugins.specs import SPECS

OPS = [op for op in SPECS if find_spec(f"llmctl.plugins.{op}.kernel")]
LARGE = 2048  # input features of a matrix that takes long to make


def specs_of(op: str) -> list[KernelSpec]:
    """Every binary that a case of the spec needs; cases of other backends are left out."""
    found: list[KernelSpec] = []
    for case in (*SPECS[op].cases, *SPECS[op].timed):
        is_large = int(case.get("inner", 0)) > LARGE
        if case.get("x_dtype", case["dtype"]) in (*KERNEL_DTYPES, FP8) and not is_large:
            example = make_example(op, case)
            try:
                found += import_module(f"llmctl.plugins.{op}.kernel").kernels(
                    example.call, limits_for(example)
                )
            except Unsupported:
                continue
    return found


@pytest.mark.parametrize("op", OPS)
def test_a_kernels_name_says_which_binary_it_is(op):
    by_name: dict[str, KernelSpec] = {}
    for spec in specs_of(op):
        assert by_name.setdefault(spec.name, spec) == spec, spec.name
    assert by_name


def representatives(specs: list[KernelSpec]) -> list[KernelSpec]:
    """One of the kernels that differ in nothing but sizes that loops and addresses depend on:
    numbers of heads, tokens per block, requests. The kernels' own tests compile the
    sizes of real models."""
    chosen = {_SIZES.sub("", spec.name): spec for spec in specs}
    return list(chosen.values())


_SIZES = re.compile(r"\.(h\d+x\d+|page\d+|b\d+)(?=\.|$)")


@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_without_spills_and_keep_to_programmatic_launches(op):
    """Every launch may start before the one ahead of it has ended: a kernel that does not wait for
    it reads what is not yet written."""
    for spec in representatives(specs_of(op)):
        kernel = compile_kernel(spec)
        assert kernel.local_bytes == 0, f"{spec.name} spills {kernel.local_bytes} bytes"
        sass = disassemble(kernel)
        assert "ACQBULK" in sass, f"{spec.name} never executes griddepcontrol.wait"
        assert "PREEXIT" in sass, f"{spec.name} never executes griddepcontrol.launch_dependents"
