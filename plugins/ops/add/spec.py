"""Sum of two activations: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import EXACT, OpSpec, Role

SPEC = OpSpec(
    name="add",
    inputs=(Role("x", ("T",), ("N", "W")), Role("residual", ("T",), ("N", "W"))),
    outputs=(Role("out", ("T",), ("N", "W")),),
    tolerance=EXACT,
    cases=tuple(
        {"tokens": n, "hidden": w, "dtype": dtype}
        for n, w in ((1, 16), (5, 72), (33, 1257))
        for dtype in ("float32", "bfloat16", "float16")
    ),
    timed=({"tokens": 64, "hidden": 8192, "dtype": "bfloat16"},),
)
