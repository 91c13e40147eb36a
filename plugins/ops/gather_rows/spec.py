"""Row gather: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import EXACT, FP8, OpSpec, Role

SPEC = OpSpec(
    name="gather_rows",
    inputs=(Role("x", ("T", FP8), ("N", "H")),),
    outputs=(Role("out", ("T", FP8), ("R", "H")),),
    for_tokens=True,
    alike=("x", "out"),
    tolerance=EXACT,
    cases=tuple(
        {"tokens": n, "rows": r, "hidden": h, "dtype": dtype}
        for n, r, h in ((1, 1, 16), (17, 5, 72), (33, 2, 257))
        for dtype in ("float32", "bfloat16", "float16", FP8)
    ),
    timed=({"tokens": 256, "rows": 64, "hidden": 2048, "dtype": "bfloat16"},),
)
