"""What graphs of a plan may have of each other: inputs and outputs, and nothing between."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.builder.plan import BASE, Plan, PlanGraph, PlanTensor
from llmctl.builder.validation.errors import wrong

_Writers = Mapping[str, str]  # of activations: the graph that computes them


def check_graphs(plan: Plan, tensors: Mapping[str, PlanTensor]) -> None:
    """Raises CorruptEngine. What a graph is run for it computes itself. A head reads activations of
    its own, or its inputs: outputs of another graph, or what nothing computes. One that attends has
    a KV cache of heads (`head_caches.py`).
    """
    for name in (BASE, ""):
        if name in plan.heads:
            raise wrong(f"a head is called {name!r}")
    writers = {
        tensor: name
        for name, graph in plan.graphs.items()
        for op in graph.ops
        for tensor in op.outputs.values()
    }
    for name, graph in plan.graphs.items():
        for role, tensor in graph.outputs.items():
            if writers.get(tensor) != name or not _is_activation(tensors, tensor):
                raise wrong(f"output {role!r} is {tensor!r}, which no operator writes in {name!r}")
    for name, head in plan.heads.items():
        _check_inputs(plan, name, tensors, writers)
        _check_reads(name, head, tensors, writers)


def _check_inputs(
    plan: Plan, name: str, tensors: Mapping[str, PlanTensor], writers: _Writers
) -> None:
    for role, tensor in plan.heads[name].inputs.items():
        if not _is_activation(tensors, tensor):
            raise wrong(f"input {role!r} of head {name!r} is {tensor!r}, which is no activation")
        writer = writers.get(tensor)
        if writer is not None and (
            writer == name or tensor not in plan.graphs[writer].outputs.values()
        ):
            raise wrong(
                f"input {role!r} of head {name!r} is {tensor!r}, which is no output of another "
                "graph"
            )


def _check_reads(
    name: str, head: PlanGraph, tensors: Mapping[str, PlanTensor], writers: _Writers
) -> None:
    given = set(head.inputs.values())
    if not head.ops:
        raise wrong(f"head {name!r} has no operators")
    for op in head.ops:
        if "layer" in op.attributes and not head.cache:
            raise wrong(f"operator {op.name!r} of head {name!r} needs a KV cache")
        for role, tensor in op.inputs.items():
            is_own = tensor in given or writers.get(tensor) == name
            if _is_activation(tensors, tensor) and not is_own:
                raise wrong(
                    f"operator {op.name!r} of head {name!r} reads {role} {tensor!r}, which is "
                    "neither its own nor an input"
                )


def _is_activation(tensors: Mapping[str, PlanTensor], name: str) -> bool:
    return name in tensors and tensors[name].kind == "activation"
