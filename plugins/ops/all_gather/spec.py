"""Columns of all ranks side by side: roles, sizes. The last ranks' may be padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.core.op_rules import known_ranks
from llmctl.plugins.core.op_spec import EXACT, OpSpec, Role

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
    inputs=(Role("x", ("float32",), ("N", "P")),),
    outputs=(Role("out", ("float32",), ("N", "V")),),
    attributes={"ranks": int},
    rules=(known_ranks, _enough),
    tolerance=EXACT,
    cases=tuple(  # of one rank; tests/plugins/backends/test_cpu_ranks.py has several
        {"tokens": n, "own": own, "columns": columns, "dtype": "float32"}
        for n, own, columns in ((1, 64, 64), (5, 64, 33), (40, 192, 131))
    ),
    timed=({"tokens": 8, "own": 64_128, "columns": 64_128, "dtype": "float32"},),
)
