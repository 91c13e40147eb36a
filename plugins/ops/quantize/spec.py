"""Quantization to FP8: roles, sizes. `scale` (static) and `out_scale` (per token) exclude each
other; exactly one is present."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import scales_output
from llmctl.plugins.core.op_spec import EXACT, FP8, OpSpec, Role

SPEC = OpSpec(
    name="quantize",
    inputs=(
        Role("x", ("T",), ("N", "K")),
        Role("scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(
        Role("out", (FP8,), ("N", "K")),
        Role("out_scale", ("float32",), ("N",), optional=True),
    ),
    rules=(scales_output("out", "scale", "out_scale"),),
    tolerance=EXACT,
    cases=tuple(
        {"tokens": n, "hidden": k, "dtype": dtype, "scaling": scaling}
        for n, k in ((1, 16), (3, 31), (33, 264))
        for dtype in ("float32", "bfloat16", "float16")
        for scaling in ("static", "per_token")
    ),
    timed=(
        {"tokens": 1, "hidden": 2048, "dtype": "bfloat16", "scaling": "static"},
        {"tokens": 256, "hidden": 2048, "dtype": "bfloat16", "scaling": "static"},
    ),
)
