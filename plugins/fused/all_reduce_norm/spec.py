"""The sum over ranks followed by a norm: roles, sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.core.op_rules import (
    NORM_LIMITS,
    columns_of_leaves,
    known_ranks,
    scales_output,
)
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

PART = 256  # columns that a warp of the GPU's kernel has, or twice as many of a long row
MOST_WARPS, MAX_PARTS, MAX_BLOCKS_OF_ROW = 32, 64, 8


def warps_of(hidden: int) -> int | None:
    """Warps of each of the blocks that share a row: the fewest. None: rows that are no whole parts,
    or too long, for which there is no kernel."""
    if hidden % PART or not 1 <= hidden // PART <= MAX_PARTS:
        return None
    all_warps = row_warps(hidden)
    fitting = (n for n in range(1, all_warps + 1) if not all_warps % n)
    return next(n for n in fitting if all_warps // n <= MAX_BLOCKS_OF_ROW)


def row_warps(hidden: int) -> int:
    """Warps of a row, as many as `rms_norm` has, whose sum of squares has the same order."""
    return min(hidden // PART, MOST_WARPS)


def _whole_parts(call: OpCall) -> str | None:
    hidden = int(call.inputs["residual"].shape[1])
    if warps_of(hidden) is not None:
        return None
    return f"has rows of {hidden}; multiples of {PART} up to {PART * MAX_PARTS} are wanted"


SPEC = OpSpec(
    name="all_reduce_norm",
    inputs=(
        Role("x", ("float32",), ("N", "X")),
        Role("weight_scale", ("float32",), ("H",), optional=True),
        Role("x_scale", ("float32",), ("1",), optional=True),  # of every rank's input alike
        Role("bias", ("T",), ("H",), optional=True),
        Role("residual", ("T",), ("N", "H")),
        Role("norm_weight", ("T",), ("H",)),
        Role("scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(
        Role("out", ("T", FP8), ("N", "H")),
        Role("residual_out", ("T",), ("N", "H"), optional=True),
    ),
    attributes={"ranks": int, "epsilon": float},
    # leaves: see all_reduce. pushed: up to so many tokens the product hands its sums on itself.
    # keeps: 1 where the next call alone reads residual_out: with two hops a row's owner keeps it.
    optional_attributes={"leaves": int, "pushed": int, "keeps": int},
    derived={"X": columns_of_leaves("H")},
    rules=(known_ranks, NORM_LIMITS, scales_output("out", "scale"), _whole_parts),
    cases=tuple(  # of one rank; tests/plugins/ops/test_peers_emulated.py has several
        {"tokens": n, "hidden": h, "dtype": dtype, "scaling": scaling, "bias": bias}
        for n, h, bias in ((1, 256, False), (5, 768, True), (33, 2048, False))
        for dtype in ("bfloat16", "float16")
        for scaling in ("none", "static")
    )
    + (
        {
            "tokens": 3,
            "hidden": 512,
            "dtype": "bfloat16",
            "scaling": "static",
            "bias": False,
            "leaves": 4,
        },
    ),
    timed=tuple(
        {"tokens": n, "hidden": 8192, "dtype": "bfloat16", "scaling": "static", "bias": False}
        for n in (1, 11)
    ),
)
