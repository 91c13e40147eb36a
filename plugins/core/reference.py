"""The reference backend: every call through its operator's plain-torch reference.

Slow and simple. It runs on any device, and every kernel is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmctl.plugins.core.calls import OpCall, StepInputs, row_extents
from llmctl.plugins.core.operators import check_call, operator_module

if TYPE_CHECKING:
    import torch

# Inputs that have one row per token (or per logit row) and shrink with the step.
ROW_ROLES = frozenset({"x", "residual"})


class ReferenceProgram:
    """A program that calls `plugins/ops/<op>/reference.py` for each operator."""

    def __init__(self, calls: Sequence[OpCall], row_inputs: Sequence[torch.Tensor] = ()) -> None:
        for call in calls:
            check_call(call)
        self._calls = tuple(zip(calls, row_extents(calls, row_inputs=row_inputs), strict=True))
        self._functions = {
            op: operator_module(op, "reference").reference for op in {call.op for call in calls}
        }

    def run(self, step: StepInputs, kv_cache: torch.Tensor) -> None:
        """Execute every call in order on the first N (or R) rows of its activations."""
        for call, extent in self._calls:
            rows = step.num_tokens if extent == "tokens" else step.num_rows
            if call.op == "gather_rows":
                rows = step.num_tokens  # what it reads; it writes num_rows
            inputs = _narrow(call.inputs, rows)
            self._functions[call.op](inputs, call.outputs, call.attributes, step, kv_cache)


def _narrow(inputs: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    return {role: tensor[:rows] if role in ROW_ROLES else tensor for role, tensor in inputs.items()}
