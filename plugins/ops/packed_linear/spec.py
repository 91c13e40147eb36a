"""Packed matrix product: roles, sizes. `layout.py` describes the packed weight.

Compared with float64, a sum over K moves by the tensor core's accumulation: its FP8 products are
aligned to the largest before they are added, so short of that a part in 2**13 is lost per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmctl.plugins.core.op_rules import (
    NORM_LIMITS,
    RANK_COUNTS,
    name_of,
    packed_operands,
    partial_sums,
    scales_input,
    together,
)
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role, Tolerance
from llmctl.plugins.ops.packed_linear.forms import LEAF_ROWS, TILE_ROWS
from llmctl.plugins.schemes.table import FORMS, find_form

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

# Of packed weights. Which codes the elements are, where that is not their dtype, the attribute
# `scheme` says.
WEIGHT_DTYPES = ("T", FP8, *dict.fromkeys(f.dtype for f in FORMS.values() if f.is_coded))
# Inputs that all packed matrix products share.
INPUTS = (
    Role("x", ("T", FP8), ("N", "K")),
    Role("weight", WEIGHT_DTYPES, ("RT", "KT", str(TILE_ROWS), "C")),
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
OPTIONAL_ATTRIBUTES = {"epsilon": float, "scheme": str}  # epsilon: of the norm
ONE_OR = {"S": "N"}
_COMMON_RULES = (
    packed_operands,
    together("norm_weight", "residual", "normal", "epsilon"),
    NORM_LIMITS,
)
RULES = (scales_input("weight", "weight_scale"), *_COMMON_RULES)
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
    """Blocks along K."""
    return -(-dims["K"] // dims["columns"])


def block_sizes(call: OpCall) -> dict[str, int]:
    """columns: of K, in a block; C: elements of a block's row. Raises CorruptEngine for a scheme
    that is not known or not of such a weight."""
    if "weight" not in call.inputs:
        return {}
    form = find_form(name_of(call.inputs["weight"]), call.attributes)
    return {"columns": form.columns, "C": form.row_elements}


# A case's dtype is the name of the weight's form; activations have the dtype of its numbers. Scales
# go with FP8 only. `inner` is a multiple of 16 bytes (bulk copies), for 4-bit weights of a block.
_DTYPES = tuple(FORMS)


def _apart(call: OpCall) -> str | None:
    """Parts of K are whole blocks, and rows of two are never in one tile."""
    leaves, inner = int(call.attributes.get("leaves", 1)), int(call.inputs["x"].shape[1])
    rows, columns = int(call.outputs["out"].shape[1]), block_sizes(call)["columns"]
    is_partial = bool(call.attributes.get("is_partial", False))
    if leaves == 1 or (
        is_partial
        and leaves in RANK_COUNTS
        and inner % (leaves * columns) == 0
        and rows % (leaves * LEAF_ROWS) == 0
        and not find_form(name_of(call.inputs["weight"]), call.attributes).is_coded
    ):
        return None
    return (
        f"adds {inner} columns in {leaves} parts for {rows} rows; wanted partial sums, parts of "
        f"whole blocks of {columns} and {LEAF_ROWS} rows of FP8 or 16-bit weights"
    )


SPEC = OpSpec(
    name="packed_linear",
    inputs=(*INPUTS, *NORM_INPUTS),
    outputs=(Role("out", ("T", "float32"), ("N", "O")), *NORM_OUTPUTS),
    # is_partial: K is a rank's share, and what follows the sum is all_reduce's. leaves: parts of K
    # that are added apart, each in rows of its own (leaves.cuh), as all_reduce reads them.
    # pushed_to: ranks that have a GPU each, which get the sums of few tokens from the product.
    optional_attributes=OPTIONAL_ATTRIBUTES | {"is_partial": bool, "leaves": int, "pushed_to": int},
    sizes=block_sizes,
    derived={
        "RT": lambda d: row_tiles(d["O"]),
        "KT": lambda d: inner_chunks({**d, "K": d["K"] // max(1, d.get("leaves", 1))}),
        "rows": lambda d: row_tiles(d["O"]) * TILE_ROWS,
    },
    one_or=ONE_OR,
    rules=(partial_sums("weight"), *_COMMON_RULES, _apart),
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
    )
    + tuple(  # a rank's share of K
        {
            "tokens": m,
            "outputs": 192,
            "inner": k,
            "dtype": dtype,
            "out": "float32",
            "x_scaling": "static",
            "bias": False,
            "is_partial": True,
        }
        for m, k in ((1, 1056), (11, 2304), (130, 544))
        for dtype, form in FORMS.items()
        if not form.is_coded
    )
    + tuple(  # K in parts that are added apart
        {
            "tokens": m,
            "outputs": leaves * rows,
            "inner": k,
            "dtype": dtype,
            "out": "float32",
            "x_scaling": "static",
            "bias": False,
            "is_partial": True,
            "leaves": leaves,
        }
        for m, rows, k, leaves in ((1, 128, 1024, 8), (11, 256, 5376, 2), (130, 128, 2048, 4))
        for dtype, form in FORMS.items()
        if not form.is_coded
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
        for dtype in _DTYPES
        if dtype != "float16"
        for o, k in ((3072, 2048), (2048, 2048), (2048, 8192), (8192, 8192), (8192, 28672))
        for m in (1, 11)
    ),
)
