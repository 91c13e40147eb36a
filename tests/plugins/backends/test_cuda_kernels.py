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


@cache
def specs_of(op: str) -> tuple[KernelSpec, ...]:
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
    return tuple(found)


@pytest.mark.parametrize("op", OPS)
def test_a_kernels_name_says_which_binary_it_is(op):
    by_name: dict[str, KernelSpec] = {}
    for spec in specs_of(op):
        assert by_name.setdefault(spec.name, spec) == spec, spec.name
    assert by_name


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


def _num_options(spec: KernelSpec) -> tuple[int, bool, int, str]:
    """Windows that are read from memory are more to do than one that is compiled in, and more
    tokens than fewer."""
    tokens = re.search(r"\.n(\d+)r|\.\d+x(\d+)", spec.name)
    most = int(tokens[1] or tokens[2]) if tokens else 0
    return spec.name.count("."), ".windows" in spec.name, most, spec.name


def kind(name: str) -> str:
    """What of a kernel's name registers depend on."""
    name = _SIZES.sub("", name)
    if name.startswith("paged_attention."):
        name = re.sub(r"\.window\d+\b", ".window", name)
        name = re.sub(r"\.d(80|96)\b", ".padded", name)  # a tile of 128, part of it masked
        name = name.replace(".out_scale", "")  # with it there is more to do
        if ".d128" not in name:  # with a window there is more to do
            name = re.sub(r"\.windows?\b", "", name)
    if name.startswith("packed_linear"):
        name = _TILES.sub("", name)
    elif name.startswith("paged_attention.") and not _FP16_KEPT.search(name):
        name = re.sub(r"(?<=[._])fp16\b", "bf16", name)
    return name


# FP16 takes the registers that BF16 does: attention is compiled for it where there is most to do.
_FP16_KEPT = re.compile(r"\.d128\b")
# Sizes that loops and addresses depend on: numbers of heads, tokens per block, requests.
_SIZES = re.compile(r"\.(h\d+x\d+|page\d+|b\d+)(?=\.|$)")
# Of packed products, and the slots and parts that belong to them: the tests of packed_linear
# compile all kinds of tiles, for types with most to do. Here are all types, for the largest tile.
_TILES = re.compile(
    r"\.(n\d+r\d+c\d+s\d+|\d+x\d+(even)?|l\d+|h\d+\.\d+x\d+)(?=\.|$)|(?<=\.k)\d+i\d+"
)
# Its cases have one rank, which launches the kernels of two other operators.
_OF_OTHERS = {"all_reduce_norm"}
# Of keys and values. Attention reads what earlier steps cached as soon as these let it start.
_WRITERS = {"packed_linear_rope_kv", "rope_kv_write"}


# A disassembly takes half a second, however little there is: small kernels share one.
TOGETHER = [
    *([op] for op in OPS if op not in small_kernels.OPS),
    [op for op in OPS if op in small_kernels.OPS],
]


@pytest.mark.parametrize("ops", TOGETHER, ids=" ".join)
def test_kernels_compile_without_spills_and_keep_to_programmatic_launches(ops):
    """Every launch may start before the one ahead of it has ended: a kernel that does not wait for
    it reads what is not yet written."""
    found = {op: representatives(op) for op in ops}
    assert all(bool(specs) != (op in _OF_OTHERS) for op, specs in found.items())
    by_op = [(op, spec) for op, specs in found.items() for spec in specs]
    compiled = compile_all([spec for _, spec in by_op])
    for (op, _), (spec, kernel, sass) in zip(by_op, compiled, strict=True):
        assert kernel.local_bytes == 0, f"{spec.name} spills {kernel.local_bytes} bytes"
        assert "ACQBULK" in sass, f"{spec.name} never executes griddepcontrol.wait"
        assert "PREEXIT" in sass, f"{spec.name} never executes griddepcontrol.launch_dependents"
        if op in _WRITERS:
            before = re.findall(r"ACQBULK|UBLKCP|UTMALDG|LDG|STG|EXIT", sass.split("PREEXIT")[0])
            assert before[-1] == "ACQBULK", f"{spec.name} lets others start before its own wait"
