"""The calls of a plan, the arrays of its steps and its KV caches on meta tensors, without memory.
The kernels that an engine needs follow from these (engine_kernels.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import BASE, TENSORRT_OP, Plan, PlanOp
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits, step_shapes
from llmctl.plugins.core.calls import Extent, OpCall

if TYPE_CHECKING:
    import torch


def calls_by_cache(
    plan: Plan, limits: StepLimits
) -> Iterator[tuple[StepLimits, torch.Tensor, list[tuple[OpCall, Extent]]]]:
    """(the limits, the cache, the `distinct_calls`) of the graphs that have each KV cache."""
    for name, spec in plan.caches.items():
        own = replace(limits, kv_dtype=spec.dtype)
        yield own, meta_cache(plan, own, name), distinct_calls(plan, name)


def distinct_calls(plan: Plan, cache: str = "") -> list[tuple[OpCall, Extent]]:
    """The calls of all graphs with this KV cache ("": the base graph's, or none) on meta tensors,
    and whether they process tokens or rows.

    Calls that differ only in their name and layer are listed once: the layers of a model share
    kernels. Compared before any tensor is made, because every opening of an engine asks.
    """
    forms = {t.name: (t.shape, t.dtype) for t in plan.tensors}
    ops: dict[Any, PlanOp] = {}
    graphs = [graph for graph in plan.graphs.values() if graph.cache == cache]
    for op in (each for graph in graphs for each in graph.ops):
        if op.op == TENSORRT_OP:  # launches what TensorRT compiled
            continue
        signature = (
            *(op.op, op.tactic),
            *op.inputs,
            *map(forms.get, op.inputs.values()),
            *op.outputs,
            *map(forms.get, op.outputs.values()),
            *sorted(pair for pair in op.attributes.items() if pair[0] != "layer"),
        )
        ops.setdefault(signature, op)
    return _meta_calls(plan, ops.values())


def meta_calls(plan: Plan, graph: str = BASE) -> list[tuple[OpCall, Extent]]:
    """The calls of a graph in order, on meta tensors: what a call makes is what others take."""
    return _meta_calls(plan, plan.graphs[graph].ops)


def _meta_calls(plan: Plan, ops: Iterable[PlanOp]) -> list[tuple[OpCall, Extent]]:
    import torch

    sizes = plan.sizes
    tensors = {t.name: t for t in plan.tensors}

    @cache
    def make(name: str) -> torch.Tensor:
        tensor = tensors[name]
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
        return without_memory(shape, getattr(torch, tensor.dtype))

    calls: list[tuple[OpCall, Extent]] = []
    for op in ops:
        is_rows = any(tensors[name].shape[0] != "tokens" for name in op.outputs.values())
        inputs = {role: make(name) for role, name in op.inputs.items() if name in tensors}
        outputs = {role: make(name) for role, name in op.outputs.items()}
        call = OpCall(op.op, op.name, inputs, outputs, op.attributes, op.tactic)
        calls.append((call, "rows" if is_rows else "tokens"))
    return calls


def without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on torch's meta device."""
    import torch

    return torch.empty(shape, dtype=dtype, device="meta")


def alike(x: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """`Parts` (kernel_spec.py) where nothing has memory: all ranks have one plan."""
    return (x,) * ranks


def meta_step(limits: StepLimits) -> DeviceStep:
    """The arrays of a step, without memory."""
    import torch

    shapes = step_shapes(limits)
    return DeviceStep(
        **{name: without_memory(shape, torch.int32) for name, shape in shapes.items()}
    )


def meta_cache(plan: Plan, limits: StepLimits, name: str = "") -> torch.Tensor:
    """A KV cache of full sequences, without memory; `name` as in `Plan.caches`."""
    import torch

    spec = plan.caches[name]
    blocks = limits.max_batch_size * -(-limits.max_seq_len // spec.tokens_per_block)
    heads = (spec.num_kv_heads, spec.tokens_per_block, spec.head_size)
    return without_memory((spec.num_layers, blocks, 2, *heads), getattr(torch, spec.dtype))
