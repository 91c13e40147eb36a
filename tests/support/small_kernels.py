"""The row-wise Triton kernels, and which of them tests compile."""

from __future__ import annotations

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.op_spec import Case
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
CASES = [
    (op, case)
    for op in OPS
    for case in (*SPECS[op].cases, *SPECS[op].timed)
    if case["dtype"] in KERNEL_DTYPES or op in FLOAT32
]
# FP16 takes the registers that BF16 does: kernels for it are compiled on the machine with the GPU
# (tests/gpu/test_builds_compiled.py).
HERE = [(op, case) for op, case in CASES if case["dtype"] != "float16"]
ON_A_GPU_MACHINE = [(op, case) for op, case in CASES if case["dtype"] == "float16"]


def label(value: object) -> str:
    """An id of a test."""
    return ".".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def require_no_spills(op: str, case: Case) -> None:
    """All kernels of the case keep everything in registers."""
    example = make_example(op, case)
    for spec in operator_module(op, "kernel").kernels(example.call, limits_for(example)):
        assert compile_kernel(spec).local_bytes == 0, spec.name
