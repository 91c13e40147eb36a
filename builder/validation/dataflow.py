"""Who writes and reads what: every value once, before it is read, and where nothing alive lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from llmctl.builder.container import DTYPES
from llmctl.builder.plan import TENSORRT_OP, Plan, PlanGraph, PlanOp, PlanTensor
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.tensors import STEP
from llmctl.errors import CorruptEngine

_Span = tuple[int, int]
_UNREAD = ("normal",)  # outputs that are there for their kernel's own use


def check_dataflow(plan: Plan, tensors: Mapping[str, PlanTensor]) -> None:
    """Raises CorruptEngine. A value lives from the operator that writes it to the last that reads
    it, an output of the base graph to the end, an input or output of a head (`check_graphs`) from
    where the base graph ends; two that live at once share no byte of the arena. The one exception
    is rms_norm, whose sum may take the place of the residual it is made from.
    """
    ops = [op for graph in plan.graphs.values() for op in graph.ops]
    last_read: dict[str, int] = {}
    for index, op in enumerate(ops):
        for name in op.inputs.values():
            last_read[name] = index
    for role, name in plan.outputs.items():
        if name not in tensors or tensors[name].kind != "activation":
            raise wrong(f"output {role!r} is {name!r}, which no operator writes")
    kept = {name: None for head in plan.heads.values() for name in _ends(head)}
    last_read |= dict.fromkeys((*plan.outputs.values(), *kept), len(ops))
    spans = _spans(plan)
    alive: dict[str, _Span] = {}
    written: set[str] = set()
    for index, op in enumerate(ops):
        if index == len(plan.ops):
            _keep(kept, spans, alive)
            written.update(name for name in plan.heads for name in plan.given_inputs(name).values())
        for role, name in op.inputs.items():
            if name in spans and (name not in alive or name not in written):
                state = "written later" if name not in written else "overwritten"
                raise wrong(f"{_called(op)} reads {role} {name!r}, which is {state}")
            if name not in tensors and not (op.op == TENSORRT_OP and name.startswith(STEP)):
                raise wrong(f"{_called(op)} reads {role} {name!r}, which the plan does not have")
        for role, name in op.outputs.items():
            if name not in spans:
                kind = "a weight" if name in tensors else "not in the plan"
                raise wrong(f"{_called(op)} writes {role} to {name!r}, which is {kind}")
            if name in written:
                raise wrong(f"{_called(op)} writes {role} to {name!r}, which is written before")
            if name not in last_read and role not in _UNREAD:
                raise wrong(f"{_called(op)} writes {role} to {name!r}, which nothing reads")
            _require_room(op, role, spans[name], alive, last_read, index)
            written.add(name)
            alive[name] = spans[name]
        for name in [name for name in alive if last_read.get(name, index) <= index]:
            del alive[name]
    used = written.union(last_read)
    if len(used.intersection(tensors)) != len(tensors):
        name = next(name for name in tensors if name not in used)
        raise wrong(f"{tensors[name].kind} {name!r} is used by no operator")


def _ends(head: PlanGraph) -> list[str]:
    return [*head.inputs.values(), *head.outputs.values()]


def _keep(kept: Iterable[str], spans: Mapping[str, _Span], alive: dict[str, _Span]) -> None:
    """From here on these are alive, beside what the base graph leaves."""
    for name in kept:
        for other, span in alive.items():
            if other != name and spans[name][0] < span[1] and span[0] < spans[name][1]:
                raise wrong(f"{name!r} shares bytes of the arena with {other!r}; heads need both")
        alive[name] = spans[name]


def _require_room(
    op: PlanOp,
    role: str,
    span: _Span,
    alive: Mapping[str, _Span],
    last_read: Mapping[str, int],
    index: int,
) -> None:
    for other, (start, end) in alive.items():
        if span[0] >= end or start >= span[1] or other == op.outputs[role]:
            continue
        is_in_place = (
            (op.op, role, op.inputs.get("residual")) == ("rms_norm", "residual_out", other)
            and span == (start, end)
            and last_read[other] == index
        )
        if not is_in_place:
            raise _overlap(op, role, span, other, (start, end))


def _overlap(op: PlanOp, role: str, span: _Span, other: str, its: _Span) -> CorruptEngine:
    return wrong(
        f"{_called(op)} writes {role} to bytes {span[0]} to {span[1]} of the arena; "
        f"{other!r} is still needed in {its[0]} to {its[1]}"
    )


def _spans(plan: Plan) -> dict[str, _Span]:
    """Bytes of the arena that each activation takes."""
    rows = plan.sizes
    found = {}
    for tensor in plan.tensors:
        if tensor.kind == "activation":
            first, *rest = tensor.shape
            size = math.prod(map(int, rest)) * rows[str(first)] * DTYPES[tensor.dtype][1]
            assert tensor.offset is not None  # check_tensors
            found[tensor.name] = (tensor.offset, tensor.offset + size)
    return found


def _called(op: PlanOp) -> str:
    return f"operator {op.name!r} ({op.op})"
