"""Logits of a reduced vocabulary: roles, sizes.

index[v] is the column of `x` that has the logit of token v; where it is no column, the token is not
in the reduced vocabulary and its logit is minus infinity.

    out[n, v] = x[n, index[v]]
"""

from __future__ import annotations

from llmctl.plugins.core.op_spec import EXACT, OpSpec, Role

SPEC = OpSpec(
    name="expand_logits",
    inputs=(Role("x", ("float32",), ("N", "D")), Role("index", ("int32",), ("V",))),
    outputs=(Role("out", ("float32",), ("N", "V")),),
    tolerance=EXACT,
    cases=tuple(
        {"tokens": n, "reduced": d, "vocab": v, "dtype": "float32"}
        for n, d, v in ((1, 5, 16), (5, 131, 131), (33, 257, 2500))
    ),
    timed=({"tokens": 8, "reduced": 32000, "vocab": 128256, "dtype": "float32"},),
)
