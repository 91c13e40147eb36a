"""What holds for the kernels of every operator, over all cases of its spec."""

from __future__ import annotations

import re
from functools import cache

import pytest
from support import small_kernels
from support.attention_compiled import HERE, of_chains
from support.attention_models import world_of
from support.kernel import KERNEL_DTYPES, compile_all, limits_for

from llmctl.errors import Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.core.operators import SPECS, has_module, operator_module

OPS = [op for op in SPECS if has_module(op, "kernel")]
LARGE = 2048  # input features of a matrix that takes long to make


def specs_of(op: str) -> list[KernelSpec]:
    """Every binary that a case of the spec needs; cases of other backends are left out."""
    found: list[KernelSpec] = []
    for case in (*SPECS[op].cases, *SPECS[op].timed):
        is_large = int(case.get("inner", 0)) > LARGE
        inputs = SPECS[op].inputs[0].dtypes  # of logits: float32 alone
        taken = (*KERNEL_DTYPES, FP8, *(inputs if inputs == ("float32",) else ()))
        if case.get("x_dtype", case["dtype"]) in taken and not is_large:
            example = make_example(op, case)
            try:
                found += operator_module(op, "kernel").kernels(example.call, limits_for(example))
            except Unsupported:
                continue
    return found


@pytest.mark.parametrize("op", OPS)
def test_a_kernels_name_says_which_binary_it_is(op):
    by_name: dict[str, KernelSpec] = {}
    for spec in specs_of(op):
        assert by_name.setdefault(spec.name, spec) == spec, spec.name
    assert by_name


PARTS = 4  # of the kernels of an operator that has many: workers share them


@cache
def representatives(op: str) -> tuple[KernelSpec, ...]:
    """One of the kernels that cannot differ in spills, the one with most to do. The kernels' own
    tests compile the sizes of real models, and those of attention check all that is checked here:
    only what is of another kind is left."""
    chosen: dict[str, KernelSpec] = {}
    elsewhere = checked_elsewhere() if op == "paged_attention" else set()
    others = tuple(f"{other}." for other in OPS if other != op)
    own = [spec for spec in specs_of(op) if not spec.name.startswith(others)]
    if op in small_kernels.OPS:
        return tuple(small_kernels.with_most_to_do(own))
    for spec in sorted(own, key=_num_options):
        if kind(spec.name) not in elsewhere:
            chosen[kind(spec.name)] = spec
    return tuple(chosen.values())


def checked_elsewhere() -> set[str]:
    """The kinds that paged_attention/test_kernel.py and tests/gpu compile and check, with windows
    that are compiled in, too."""
    worlds = [world_of(heads, kv) for heads, kv in HERE]
    worlds += [world_of("70b", kv, window=4096) for kv in ("fp8", "int8")]
    return {kind(spec.name) for world in worlds for spec in of_chains(world)}


def _num_options(spec: KernelSpec) -> tuple[int, bool, str]:
    """Windows that are read from memory are more to do than one that is compiled in."""
    return spec.name.count("."), ".windows" in spec.name, spec.name


def kind(name: str) -> str:
    """What of a kernel's name registers depend on."""
    name = _SIZES.sub("", name)
    if name.startswith("paged_attention."):
        name = re.sub(r"\.window\d+\b", ".window", name)
        name = re.sub(r"\.d(80|96)\b", ".padded", name)  # a tile of 128, part of it masked
        name = name.replace(".out_scale", "")  # with it there is more to do
        if ".d128" not in name:  # with a window there is more to do
            name = re.sub(r"\.windows?\b", "", name)
    if name.startswith(_HAVE_BOTH) and not _FP16_KEPT.search(name):
        name = re.sub(r"(?<=[._])fp16\b", "bf16", name)
    return name


# FP16 takes the registers that BF16 does: these operators are compiled for it where there is most
# to do, or as the smallest of their tiles.
_HAVE_BOTH = ("paged_attention.", "packed_linear")
_FP16_KEPT = re.compile(r"\.(d128|n8r\w+|128x256)\b")
# Sizes that loops and addresses depend on: numbers of heads, tokens per block, requests.
_SIZES = re.compile(r"\.(h\d+x\d+|page\d+|b\d+)(?=\.|$)")
_MANY = {"paged_attention", "packed_linear"}
# Its cases have one rank, which launches the kernels of two other operators.
_OF_OTHERS = {"all_reduce_norm"}
# Of keys and values. Attention reads what earlier steps cached as soon as these let it start.
_WRITERS = {"packed_linear_rope_kv", "rope_kv_write"}


@pytest.mark.parametrize(
    ("op", "part"), [(op, part) for op in OPS for part in range(PARTS if op in _MANY else 1)]
)
def test_kernels_compile_without_spills_and_keep_to_programmatic_launches(op, part):
    """Every launch may start before the one ahead of it has ended: a kernel that does not wait for
    it reads what is not yet written."""
    specs = representatives(op)[part :: PARTS if op in _MANY else 1]
    assert bool(specs) != (op in _OF_OTHERS)
    for spec, kernel, sass in compile_all(specs):
        assert kernel.local_bytes == 0, f"{spec.name} spills {kernel.local_bytes} bytes"
        assert "ACQBULK" in sass, f"{spec.name} never executes griddepcontrol.wait"
        assert "PREEXIT" in sass, f"{spec.name} never executes griddepcontrol.launch_dependents"
        if op in _WRITERS:
            before = re.findall(r"ACQBULK|UBLKCP|UTMALDG|LDG|STG|EXIT", sass.split("PREEXIT")[0])
            assert before[-1] == "ACQBULK", f"{spec.name} lets others start before its own wait"
