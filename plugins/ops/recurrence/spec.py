"""One step of a recurrence: roles, sizes.

Row n continues row logit_rows[n] of `context` and `carry`, which the step before left; a first step
has a context alone. `x` is the product of what the row takes in, `carry` that of the state before;
with attribute `silu` their sum is activated.

    state[n] = silu(x[n] + carry[logit_rows[n]])
    out[n] = context[logit_rows[n], :H], state[n]

Ranks that share the columns of a state compute it alone, without context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.core.op_rules import together
from llmctl.plugins.core.op_spec import OpSpec, Role

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall


def _wide_context(call: OpCall) -> str | None:
    """The first H columns of a context are what is kept of it."""
    if "context" not in call.inputs:
        return None
    width, wanted = call.inputs["context"].shape[1], call.inputs["x"].shape[1]
    return None if width >= wanted else f"context has {width} columns; {wanted} of them are kept"


SPEC = OpSpec(
    name="recurrence",
    inputs=(
        Role("x", ("T",), ("N", "H")),
        Role("context", ("T",), ("R", "W"), optional=True),
        Role("carry", ("T",), ("R", "H"), optional=True),
    ),
    outputs=(Role("out", ("T",), ("N", "D"), optional=True), Role("state", ("T",), ("N", "H"))),
    attributes={"silu": bool},
    derived={"D": lambda dims: 2 * dims["H"]},
    for_tokens=True,
    rules=(together("context", "out"), _wide_context),
    cases=tuple(
        {
            **{"tokens": n, "rows": r, "hidden": h, "dtype": dtype},
            **{"carry": carry, "silu": silu, "context": context},
        }
        for n, r, h in ((1, 1, 16), (5, 3, 72), (33, 40, 1257))
        for dtype in ("float32", "bfloat16", "float16")
        for carry, silu, context in (
            *((False, True, True), (True, True, True), (True, False, True)),
            *((False, True, False), (True, True, False)),
        )
    ),
    timed=(
        {
            "tokens": 20,
            "rows": 20,
            "hidden": 8192,
            "dtype": "bfloat16",
            "carry": True,
            "silu": True,
            "context": True,
        },
    ),
)
