"""Embedding: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import EXACT, OpSpec, Role

SPEC = OpSpec(
    name="embedding",
    inputs=(Role("weight", ("T",), ("V", "H")),),
    outputs=(Role("out", ("T",), ("N", "H")),),
    for_tokens=True,
    tolerance=EXACT,
    cases=tuple(
        {"tokens": n, "vocab": v, "hidden": h, "dtype": dtype}
        for n, v, h in ((1, 7, 16), (5, 131, 72), (33, 1000, 257))
        for dtype in ("float32", "bfloat16", "float16")
    ),
    timed=({"tokens": 256, "vocab": 32000, "hidden": 2048, "dtype": "bfloat16"},),
)
