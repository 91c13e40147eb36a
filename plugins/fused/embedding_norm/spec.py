"""Embedding followed by a norm: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import NORM_LIMITS, scales_output
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role

SPEC = OpSpec(
    name="embedding_norm",
    inputs=(
        Role("weight", ("T",), ("V", "H")),
        Role("norm_weight", ("T",), ("H",)),
        Role("scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(
        Role("embedded", ("T",), ("N", "H")),
        Role("out", ("T", FP8), ("N", "H")),
        Role("out_scale", ("float32",), ("N",), optional=True),
    ),
    attributes={"epsilon": float},
    for_tokens=True,
    rules=(scales_output("out", "scale", "out_scale"), NORM_LIMITS),
    cases=tuple(
        {"tokens": n, "vocab": v, "hidden": h, "dtype": dtype, "scaling": scaling}
        for n, v, h in ((1, 7, 16), (5, 131, 72), (33, 1000, 257))
        for dtype in ("float32", "bfloat16", "float16")
        for scaling in ("none", "static", "per_token")
    ),
    timed=tuple(
        {"tokens": n, "vocab": 32000, "hidden": 2048, "dtype": "bfloat16", "scaling": "static"}
        for n in (1, 256)
    ),
)
