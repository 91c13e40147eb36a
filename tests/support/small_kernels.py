"""The row-wise Triton kernels, and which of them tests compile."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import KernelSpec
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.operators import SPECS, operator_module
from support.kernel import KERNEL_DTYPES, limits_for

OPS = (
    *("embedding", "embedding_norm", "gather_rows", "quantize", "rms_norm", "swiglu"),
    "rope_kv_write",
    "silu",
    "recurrence",
    "concat",
    "add",
    "expand_logits",
    "all_reduce",
    "all_reduce_norm",
    "all_gather",
)
FLOAT32 = {"expand_logits", "all_gather"}  # of logits
_SIZE = re.compile(r"\.(?!i8\.)[a-z]\d+(\.\d+)*(?=\.|$)")  # i8 is a type
CASES = [
    (op, case)
    for op in OPS
    for case in (*SPECS[op].cases, *SPECS[op].timed)
    if case["dtype"] in KERNEL_DTYPES or op in FLOAT32
]


def label(value: object) -> str:
    """An id of a test."""
    return ".".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def specs_of(op: str) -> list[KernelSpec]:
    """Every binary that a case needs."""
    found: dict[str, KernelSpec] = {}
    for case in (case for own, case in CASES if own == op):
        example = make_example(op, case)
        specs = operator_module(op, "kernel").kernels(example.call, limits_for(example))
        found |= {spec.name: spec for spec in specs}
    return list(found.values())


def with_most_to_do(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Of binaries that differ in sizes alone the widest, and the widest whose rows are no whole
    vectors; none for FP16, which takes the registers that BF16 does. CI compiles these, and the
    machine with the GPU all (tests/gpu/test_builds_compiled.py)."""
    chosen: dict[tuple[str, bool], KernelSpec] = {}
    for spec in sorted(specs, key=lambda spec: _widest(spec.name)):
        if ".fp16." not in spec.name:
            is_whole = all(size % 8 == 0 for size in _sizes(spec.name) if size > 8)
            chosen[kind(spec.name), is_whole] = spec
    return list(chosen.values())


def kind(name: str) -> str:
    """A kernel's name without its sizes."""
    return _SIZE.sub("", name)


def _widest(name: str) -> int:
    """The largest size in a kernel's name."""
    return max(_sizes(name), default=0)


def _sizes(name: str) -> list[int]:
    return [int(size) for found in _SIZE.finditer(name) for size in re.findall(r"\d+", found[0])]


def require_no_spills(specs: Iterable[KernelSpec]) -> None:
    """All of them keep everything in registers."""
    for spec in specs:
        assert compile_kernel(spec).local_bytes == 0, spec.name
