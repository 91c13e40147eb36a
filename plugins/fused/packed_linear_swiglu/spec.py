"""Gate and up projections with SwiGLU: roles, sizes.

The attribute `dtype` is the model dtype, to which the products round first; with FP8 on both sides
no tensor tells it.
"""

from __future__ import annotations

from llmctl.plugins.core.op_rules import scales_output
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
from llmctl.plugins.ops.packed_linear.spec import (
    INPUTS,
    NORM_INPUTS,
    NORM_OUTPUTS,
    ONE_OR,
    OPTIONAL_ATTRIBUTES,
    RULES,
    TOLERANCE,
    block_sizes,
    inner_chunks,
    row_tiles,
)
from llmctl.plugins.schemes.table import FORMS

_CODED = tuple(form.name for form in FORMS.values() if form.is_coded)

SPEC = OpSpec(
    name="packed_linear_swiglu",
    inputs=(*INPUTS, *NORM_INPUTS, Role("scale", ("float32",), ("1",), optional=True)),
    outputs=(Role("out", ("T", FP8), ("N", "I")), *NORM_OUTPUTS),
    attributes={"dtype": str},
    optional_attributes=OPTIONAL_ATTRIBUTES,
    sizes=block_sizes,
    derived={
        "RT": lambda d: row_tiles(2 * d["I"]),
        "KT": inner_chunks,
        "rows": lambda d: row_tiles(2 * d["I"]) * TILE_ROWS,
    },
    one_or=ONE_OR,
    rules=(*RULES, scales_output("out", "scale")),
    tolerance=TOLERANCE,
    cases=tuple(
        {
            "tokens": m,
            "hidden": i,
            "inner": k,
            "dtype": dtype,
            "model_dtype": "bfloat16" if dtype in (FP8, *_CODED) else dtype,
            "scaling": scaling,
            "x_scaling": "per_token" if m % 2 == 0 else "static",
            "bias": bias,
        }
        for m, i, k, bias in ((1, 32, 128, False), (11, 72, 1056, True), (34, 200, 512, False))
        for dtype, scaling in (
            ("bfloat16", "none"),
            ("float16", "none"),
            (FP8, "none"),
            (FP8, "static"),
            *((coded, "static") for coded in _CODED),
        )
    ),
    timed=tuple(
        {
            "tokens": m,
            "hidden": i,
            "inner": k,
            "dtype": dtype,
            "model_dtype": "bfloat16",
            "scaling": "static",
            "x_scaling": "static",
            "bias": False,
        }
        for i, k in ((8192, 2048), (28672, 8192))
        for m in (1, 11)
        for dtype in (FP8, *_CODED)
    ),
)
