"""SiLU: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_spec import OpSpec, Role

SPEC = OpSpec(
    name="silu",
    inputs=(
        Role("x", ("T",), ("N", "W")),
        Role("residual", ("T",), ("N", "W"), optional=True),
    ),
    outputs=(Role("out", ("T",), ("N", "W")),),
    cases=tuple(
        {"tokens": n, "hidden": w, "dtype": dtype, "residual": residual}
        for n, w in ((1, 16), (5, 72), (33, 1257))
        for dtype in ("float32", "bfloat16", "float16")
        for residual in (False, True)
    ),
    timed=tuple(
        {"tokens": n, "hidden": 8192, "dtype": "bfloat16", "residual": True} for n in (1, 64)
    ),
)
