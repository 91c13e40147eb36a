"""Every operator by its own spec, once for all that are alike: the layers of a model are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from llmctl.builder.plan import BASE, TENSORRT_OP, Dim, Plan, PlanOp, PlanTensor
from llmctl.builder.validation.errors import wrong
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.backend import Backend
from llmctl.plugins.core.op_spec import FP8, MODEL_DTYPES, STEP_SIZES, OpSpec, Role
from llmctl.plugins.core.operators import CPU_KINDS, SPECS, has_module
from llmctl.plugins.ops.packed_linear.forms import TACTIC

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", FP8: "fp8"}
_MAIN_ROLES = ("weight", "x", "qkv", "q")  # as passes/tactics.py names kernels


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor as a spec looks at it."""

    dtype: str
    shape: tuple[Dim, ...]

    def is_contiguous(self) -> bool:
        """As all of a plan."""
        return True


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator as a spec looks at it: an `OpCall` without arrays."""

    op: str
    name: str
    inputs: Mapping[str, _Value]
    outputs: Mapping[str, _Value]
    attributes: Mapping[str, int | float | str | bool]


def check_operators(
    plan: Plan, tensors: Mapping[str, PlanTensor], backend: Backend, dtype: str
) -> None:
    """Raise CorruptEngine for an operator that the backend has not, or that breaks its spec.

    dtype: the model's, which every role "T" has. Names were looked up before (`check_dataflow`).
    """
    forms: dict[tuple[Any, ...], int] = {}
    of_tensor = {
        name: forms.setdefault((tensor.kind, tensor.dtype, tensor.shape), len(forms))
        for name, tensor in tensors.items()
    }
    known: set[tuple[Any, ...]] = set()
    for name, op in ((name, op) for name, graph in plan.graphs.items() for op in graph.ops):
        if op.op == TENSORRT_OP:  # `pieces.py` asks what TensorRT compiled
            continue
        attributes = op.attributes
        signature = (
            name == BASE,
            op.op,
            op.tactic,
            *op.inputs,
            *(of_tensor[name] for name in op.inputs.values()),
            *op.outputs,
            *(of_tensor[name] for name in op.outputs.values()),
            *(pair for pair in attributes.items() if pair[0] != "layer"),
            *map(type, attributes.values()),
        )
        if signature in known:
            continue
        _check(op, tensors, backend, dtype, is_head=name != BASE)
        known.add(signature)


def _check(
    op: PlanOp, tensors: Mapping[str, PlanTensor], backend: Backend, dtype: str, *, is_head: bool
) -> None:
    spec = SPECS.get(op.op)
    if spec is None:
        raise wrong(f"operator {op.name!r} is a {op.op!r}; known are {', '.join(SPECS)}")
    if not _has_kernels(op.op, backend.kernels):
        raise wrong(f"operator {op.name!r} is a {op.op}; backend {backend.name!r} has none")

    def values(names: Mapping[str, str]) -> dict[str, _Value]:
        return {
            role: _Value(tensors[name].dtype, tensors[name].shape) for role, name in names.items()
        }

    call = _Call(op.op, op.name, values(op.inputs), values(op.outputs), op.attributes)
    for roles, given in ((spec.inputs, call.inputs), (spec.outputs, call.outputs)):
        for role in roles:
            if role.name in given:
                _check_role(op, spec, role, given[role.name], dtype, is_head)
    spec.check(cast(Any, call))
    _check_tactic(op, call, backend)


def _check_role(
    op: PlanOp, spec: OpSpec, role: Role, value: _Value, dtype: str, is_head: bool
) -> None:
    """What a step decides has a symbol, and nothing else has; model dtypes are the model's. A head
    may gather out of rows, those of the base graph, and one that reads a token for each of its rows
    has as many tokens."""
    first = role.shape[0]
    own = ("requests", "beams") if is_head else ()
    rows = ("rows", *own)
    if first in spec.one_or:
        is_sized = value.shape[0] in (1, "tokens", *rows)
    elif first in STEP_SIZES:
        wanted = ("tokens", *own) if spec.for_tokens else ("tokens", *rows)
        if first == "R":
            wanted = rows
        elif op.op == "gather_rows" and is_head:
            wanted = ("tokens", "rows")
        is_sized = value.shape[0] in wanted
    else:
        is_sized = isinstance(value.shape[0], int)
    if not is_sized:
        raise _refused(op, f"{role.name} has shape {list(value.shape)}, wanted {list(role.shape)}")
    if value.dtype not in role.dtypes and value.dtype in MODEL_DTYPES and value.dtype != dtype:
        raise _refused(op, f"{role.name} is {value.dtype}, and the model's dtype is {dtype}")


def _check_tactic(op: PlanOp, call: _Call, backend: Backend) -> None:
    """A kernel's name as the builder chooses it. All tactics of a product give the same bits; which
    of its kernels exist is asked of the stored ones."""
    if op.op.startswith("packed_linear"):
        if not TACTIC.fullmatch(op.tactic):
            raise _refused(op, f"has the tactic {op.tactic!r}, which names no kernels")
        return
    role = next(role for role in _MAIN_ROLES if role in call.inputs)
    wanted = f"{backend.kernels}.{op.op}.{_SHORT.get(call.inputs[role].dtype)}"
    if op.tactic != wanted:
        raise _refused(op, f"has the tactic {op.tactic!r}, wanted {wanted}")


@cache
def _has_kernels(op: str, kernels: str) -> bool:
    return op in CPU_KINDS if kernels == "cpu" else has_module(op, "kernel")


def _refused(op: PlanOp, what: str) -> CorruptEngine:
    return wrong(f"{op.op} {op.name!r}: {what}")
