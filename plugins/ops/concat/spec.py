"""Concatenation of rows: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import EXACT, OpSpec, Role

SPEC = OpSpec(
    name="concat",
    inputs=(Role("x", ("T",), ("N", "H")), Role("y", ("T",), ("N", "W"))),
    outputs=(Role("out", ("T",), ("N", "D")),),
    derived={"D": lambda dims: dims["H"] + dims["W"]},
    tolerance=EXACT,
    cases=tuple(
        {"tokens": n, "hidden": h, "other": w, "dtype": dtype}
        for n, h, w in ((1, 16, 16), (5, 72, 24), (33, 257, 1300))
        for dtype in ("float32", "bfloat16", "float16")
    ),
    timed=({"tokens": 256, "hidden": 4096, "other": 4096, "dtype": "bfloat16"},),
)
