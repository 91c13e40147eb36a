"""Columns of all ranks side by side: roles, sizes. The last ranks' may be padding.

Logits are gathered where rank 0, or each rank for itself, samples; where a step wants no more than
can be merged, they stay with the ranks. What other operators read is gathered `to_all`, always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.core.op_rules import known_ranks
from llmctl.plugins.core.op_spec import EXACT, MODEL_DTYPES, OpSpec, Role

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall


def _enough(call: OpCall) -> str | None:
    """Every column of the result is some rank's."""
    own, columns = call.inputs["x"].shape[1], call.outputs["out"].shape[1]
    ranks = int(call.attributes["ranks"])
    if own * ranks >= columns:
        return None
    return f"has {own} columns of each of {ranks} ranks; {columns} are wanted"


SPEC = OpSpec(
    name="all_gather",
    inputs=(Role("x", ("T", "float32"), ("N", "P")),),
    outputs=(Role("out", ("T", "float32"), ("N", "V")),),
    attributes={"ranks": int},
    optional_attributes={"to_all": bool},
    rules=(known_ranks, _enough),
    alike=("x", "out"),
    tolerance=EXACT,
    cases=tuple(  # of one rank; tests/plugins/backends/test_cpu_ranks.py has several
        {"tokens": n, "own": own, "columns": columns, "dtype": dtype}
        for n, own, columns in ((1, 64, 64), (5, 64, 33), (40, 192, 131))
        for dtype in MODEL_DTYPES
    ),
    timed=(
        {"tokens": 8, "own": 64_128, "columns": 64_128, "dtype": "float32"},
        {"tokens": 4, "own": 16_384, "columns": 16_384, "dtype": "bfloat16"},
    ),
)
