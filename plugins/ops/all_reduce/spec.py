"""Sum over ranks: roles, sizes. What a product ends with comes after the sum, once."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import columns_of_leaves, known_ranks
from llmctl.plugins.core.op_spec import OpSpec, Role, Tolerance

SPEC = OpSpec(
    name="all_reduce",
    inputs=(
        Role("x", ("float32",), ("N", "X")),
        Role("weight_scale", ("float32",), ("O",), optional=True),
        Role("x_scale", ("float32",), ("1",), optional=True),  # of every rank's input alike
        Role("bias", ("T",), ("O",), optional=True),
    ),
    outputs=(Role("out", ("T",), ("N", "O")),),
    attributes={"ranks": int},
    # of the rank's own sum: columns [N, leaves, O] that are added first, as a tree, too
    optional_attributes={"leaves": int},
    derived={"X": columns_of_leaves("O")},
    rules=(known_ranks,),
    tolerance={
        "float32": Tolerance(1e-6, 1e-6),
        "bfloat16": Tolerance(2**-7, 1e-3),
        "float16": Tolerance(2**-10, 1e-3),
    },
    cases=tuple(  # of one rank; tests/plugins/backends/test_cpu_ranks.py has several
        {"tokens": n, "outputs": o, "dtype": dtype, "scaled": scaled, "bias": o % 2 == 1}
        for n, o in ((1, 16), (3, 37), (40, 33), (17, 257))
        for dtype in ("float32", "bfloat16", "float16")
        for scaled in (False, True)
    )
    + tuple(
        {"tokens": 3, "outputs": o, "dtype": dtype, "scaled": True, "bias": False, "leaves": leaves}
        for o, leaves in ((37, 2), (16, 8), (1040, 4))
        for dtype in ("float32", "bfloat16")
    ),
    timed=({"tokens": 1, "outputs": 8192, "dtype": "bfloat16", "scaled": True, "bias": False},),
)
