"""SwiGLU: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import scales_output
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role

SPEC = OpSpec(
    name="swiglu",
    inputs=(
        Role("x", ("T",), ("N", "2I")),
        Role("scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(
        Role("out", ("T", FP8), ("N", "I")),
        Role("out_scale", ("float32",), ("N",), optional=True),
    ),
    rules=(scales_output("out", "scale", "out_scale"),),
    derived={"2I": lambda dims: 2 * dims["I"]},
    cases=tuple(
        {"tokens": n, "hidden": i, "dtype": dtype, "scaling": scaling}
        for n, i in ((1, 16), (5, 72), (33, 257))
        for dtype in ("float32", "bfloat16", "float16")
        for scaling in ("none", "static", "per_token")
    ),
    timed=tuple(
        {"tokens": n, "hidden": 8192, "dtype": "bfloat16", "scaling": s}
        for n in (1, 256)
        for s in ("none", "static")
    ),
)
