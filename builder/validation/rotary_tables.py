"""The definitions of rotary tables: is each that of a table which operators look up, and are its
numbers such that the table is the same wherever it is computed?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmctl.builder.plan import TENSORRT_OP, Plan, PlanTensor
from llmctl.builder.rope import as_float32
from llmctl.builder.validation.errors import wrong
from llmctl.quantize.format import MAX_POSITIONS

# Published ones are 1 and less. Angles then stay within what `table.py` computes to 60 digits, and
# no product of a position and a frequency is too small for a float32 of full precision.
_LEAST_FREQUENCY, _MOST_FREQUENCY = 2.0**-80, 2.0
_MOST_FACTOR = 2.0**20


def check_rotary_tables(plan: Plan, tensors: Mapping[str, PlanTensor]) -> None:
    """Raises CorruptEngine. `check_tensors` and `check_dataflow` have passed; the number of
    positions is compared with config.json's elsewhere.

    Every table that an operator looks up is defined here, and nothing else reads one.
    """
    for name, found in plan.rotary.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.kind != "weight" or tensor.dtype != "float32":
            raise wrong(f"the rotary table {name!r} is no weight of float32")
        shape, columns = tensor.shape, 2 * len(found.frequencies)
        if len(shape) != 2 or int(shape[0]) > MAX_POSITIONS or shape[1] != columns:
            raise wrong(
                f"the rotary table {name!r} has shape {list(shape)}; up to {MAX_POSITIONS} "
                f"positions and {columns} columns, for its frequencies, are wanted"
            )
        for frequency in found.frequencies:
            if not _LEAST_FREQUENCY <= frequency <= _MOST_FREQUENCY or not _is_float32(frequency):
                raise wrong(
                    f"the rotary table {name!r} has a frequency {frequency!r}; float32 numbers "
                    f"from {_LEAST_FREQUENCY:.0e} to {_MOST_FREQUENCY:g} are wanted"
                )
        if not 0 <= found.factor <= _MOST_FACTOR or not _is_float32(found.factor):
            raise wrong(
                f"the rotary table {name!r} has the factor {found.factor!r}; a float32 number from "
                f"0 to {_MOST_FACTOR:g} is wanted"
            )
    for op in (op for graph in plan.graphs.values() for op in graph.ops if op.op != TENSORRT_OP):
        for role, name in op.inputs.items():
            if (role == "rotary") != (name in plan.rotary):
                raise wrong(
                    f"operator {op.name!r} reads {role} {name!r}, which "
                    + ("no rotary table defines" if role == "rotary" else "is a rotary table")
                )


def _is_float32(value: float) -> bool:
    return math.isfinite(value) and as_float32(value) == value
