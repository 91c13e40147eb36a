"""RMS normalization: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import NORM_LIMITS, scales_output
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role

SPEC = OpSpec(
    name="rms_norm",
    inputs=(
        Role("x", ("T",), ("N", "H")),
        Role("weight", ("T",), ("H",)),
        Role("residual", ("T",), ("N", "H"), optional=True),
        Role("scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(
        Role("out", ("T", FP8), ("N", "H")),
        Role("residual_out", ("T",), ("N", "H"), optional=True),
        Role("out_scale", ("float32",), ("N",), optional=True),
    ),
    attributes={"epsilon": float},
    rules=(scales_output("out", "scale", "out_scale"), NORM_LIMITS),
    cases=tuple(
        {"tokens": n, "hidden": h, "dtype": dtype, "scaling": scaling, "residual": residual}
        for n, h in ((1, 16), (5, 72), (33, 257))
        for dtype in ("float32", "bfloat16", "float16")
        for scaling in ("none", "static", "per_token")
        for residual in (True, False)
    ),
    timed=tuple(
        {"tokens": n, "hidden": 2048, "dtype": "bfloat16", "scaling": s, "residual": True}
        for n in (1, 256)
        for s in ("none", "static")
    ),
)
