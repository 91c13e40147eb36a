"""Packed matrix product: roles, sizes. `layout.py` describes the packed weight.

Compared with float64, a sum over K moves by the tensor core's accumulation: its FP8 products are
aligned to the largest before they are added, so short of that a part in 2**13 is lost per step.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.plugins.core.op_rules import NORM_LIMITS, packed_operands, scales_input, together
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role, Tolerance
from llmctl.plugins.ops.packed_linear.forms import FORMS, MXFP4, ROW_BYTES, TILE_ROWS

# Inputs that all packed matrix products share.
INPUTS = (
    Role("x", ("T", FP8), ("N", "K")),
    Role("weight", ("T", FP8, MXFP4), ("RT", "KT", str(TILE_ROWS), "C")),
    Role("weight_scale", ("float32",), ("rows",), optional=True),
    Role("x_scale", ("float32",), ("S",), optional=True),  # S: 1 or N
    Role("bias", ("T",), ("rows",), optional=True),
)
# With norm_weight the product first adds x and the residual and normalizes the sum, as rms_norm
# does. FP8 is divided by x_scale. `normal` has the normalized rows, where a step needs them.
NORM_INPUTS = (
    Role("norm_weight", ("T",), ("K",), optional=True),
    Role("residual", ("T",), ("N", "K"), optional=True),
)
NORM_OUTPUTS = (
    Role("normal", ("T", FP8), ("N", "K"), optional=True),
    Role("residual_out", ("T",), ("N", "K"), optional=True),
)
NORM_ATTRIBUTES = {"epsilon": float}
ONE_OR = {"S": "N"}
RULES = (
    scales_input("weight", "weight_scale"),
    packed_operands,
    together("norm_weight", "residual", "normal", "epsilon"),
    NORM_LIMITS,
)
TOLERANCE: Mapping[str, Tolerance] = {
    "float32": Tolerance(3e-3, 3e-3),
    "bfloat16": Tolerance(2**-7, 4e-3),
    "float16": Tolerance(2**-10, 4e-3),
    FP8: Tolerance(2**-3, 2**-6),
    "int8": Tolerance(0.0, 1.0),  # cached keys and values
}


def row_tiles(rows: int) -> int:
    """Tiles of 64 that hold this many rows."""
    return -(-rows // TILE_ROWS)


def inner_chunks(dims: Mapping[str, int]) -> int:
    """Blocks along K: of C elements, or of the 4-bit columns whose rows have C bytes."""
    columns = {ROW_BYTES: FORMS[MXFP4].columns}.get(dims["C"], dims["C"])
    return -(-dims["K"] // columns)


# Of weights; activations are FP8 beside 4-bit ones, else alike. Scales go with FP8 only. `inner` is
# a multiple of 16 bytes (bulk copies), for 4-bit weights of a block.
_DTYPES = ("bfloat16", "float16", FP8, MXFP4)

SPEC = OpSpec(
    name="packed_linear",
    inputs=(*INPUTS, *NORM_INPUTS),
    outputs=(Role("out", ("T", "float32"), ("N", "O")), *NORM_OUTPUTS),
    optional_attributes=NORM_ATTRIBUTES,
    derived={
        "RT": lambda d: row_tiles(d["O"]),
        "KT": inner_chunks,
        "rows": lambda d: row_tiles(d["O"]) * TILE_ROWS,
    },
    one_or=ONE_OR,
    rules=RULES,
    tolerance=TOLERANCE,
    cases=tuple(
        {
            "tokens": m,
            "outputs": o,
            "inner": k,
            "dtype": dtype,
            "out": "float32" if o % 2 else "T",
            "x_scaling": "per_token" if m % 2 == 0 else "static",
            "bias": o % 3 == 0,
        }
        for m, o, k in (
            (1, 64, 128),
            (3, 37, 96),
            (8, 192, 1056),
            (11, 131, 2304),
            (17, 200, 512),
            (33, 70, 4096),
            (130, 129, 544),
        )
        for dtype in _DTYPES
    )
    + tuple(
        {
            "tokens": m,
            "outputs": 192,
            "inner": k,
            "dtype": dtype,
            "out": "T",
            "x_scaling": "static",
            "bias": False,
            "norm": True,
        }
        for m, k in ((1, 1024), (3, 288), (12, 2048))
        for dtype in _DTYPES
    ),
    timed=tuple(
        {
            "tokens": m,
            "outputs": o,
            "inner": k,
            "dtype": dtype,
            "out": "T",
            "x_scaling": "static",
            "bias": False,
        }
        for dtype in ("bfloat16", FP8, MXFP4)
        for o, k in ((3072, 2048), (2048, 2048), (2048, 8192), (8192, 8192), (8192, 28672))
        for m in (1, 11)
    ),
)
