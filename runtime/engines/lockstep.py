"""All ranks of an engine on one GPU, for tests of what ranks compute: one plan in which every
operator of rank 0 is followed by that of rank 1, and so on.

So whatever a rank needs of others comes earlier on the one stream, nothing waits for what comes
later, and a graph of a step or of a round has the kernels of all ranks. To the rest of the runtime
it is an engine like any other, with the weights, activations and layers of all ranks; rank 0 has
the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from llmctl.builder.engine_format import (
    KvCacheSpec,
    Plan,
    PlanGraph,
    PlanOp,
    PlanTensor,
)
from llmctl.errors import CorruptEngine
from llmctl.plugins.backends.cuda.kernel_spec import Parts
from llmctl.plugins.core.shares import is_share

_ALIGNMENT = 256  # bytes, of each rank's part of the arena
_OF_RANK_0 = frozenset({"all_gather"})  # logits are read there alone


def name_on(rank: int, name: str) -> str:
    """A tensor or operator of one rank in the plan of all."""
    return f"rank{rank}/{name}"


def lockstep_plan(plans: Sequence[Plan]) -> Plan:
    """One plan of the plans of all ranks. Raises CorruptEngine where these differ."""
    plan, *others = plans
    if any(other != plan for other in others):
        raise CorruptEngine(
            f"the engine has {len(plans)} ranks and a plan for each rank; all ranks have one plan",
            fix="build the engine again",
        )
    ranks = range(len(plans))
    stride = rank_stride(plan)
    cache = plan.kv_cache
    return replace(
        plan,
        tensors=tuple(_tensor(t, rank, stride) for rank in ranks for t in plan.tensors),
        ops=tuple(
            _op(op, rank, cache.num_layers) for op in plan.ops for rank in _ranks_of(op, len(ranks))
        ),
        kv_cache=_cache(cache, len(ranks)),
        outputs={name: name_on(0, tensor) for name, tensor in plan.outputs.items()},
        arena_bytes=stride * len(ranks),
        fused=(),
        heads={name: _head(plan, graph, len(ranks)) for name, graph in plan.heads.items()},
        rotary={name_on(r, name): found for r in ranks for name, found in plan.rotary.items()},
    )


def lockstep_parts(stride: int) -> Parts:
    """What operators over ranks read of the others. stride: bytes of a rank's part of the arena,
    which are alike (`rank_stride`)."""

    def parts_of(x: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
        assert stride % x.itemsize == 0, "parts of the arena are aligned"
        step = stride // x.itemsize
        first = x.storage_offset() % step
        return tuple(
            x.as_strided(x.shape, x.stride(), first + rank * step) for rank in range(ranks)
        )

    return parts_of


def rank_stride(plan: Plan) -> int:
    """Bytes of a rank's part of the arena. plan: of one rank."""
    return -(-plan.arena_bytes // _ALIGNMENT) * _ALIGNMENT


def _ranks_of(op: PlanOp, num_ranks: int) -> range:
    return range(1 if op.op in _OF_RANK_0 else num_ranks)


def _tensor(tensor: PlanTensor, rank: int, stride: int) -> PlanTensor:
    offset = None if tensor.offset is None else tensor.offset + rank * stride
    return replace(tensor, name=name_on(rank, tensor.name), offset=offset)


def _op(op: PlanOp, rank: int, num_layers: int) -> PlanOp:
    attributes = dict(op.attributes)
    if "layer" in attributes:
        attributes["layer"] = int(attributes["layer"]) + rank * num_layers
    return replace(
        op,
        name=name_on(rank, op.name),
        inputs={role: name_on(rank, name) for role, name in op.inputs.items()},
        outputs={role: name_on(rank, name) for role, name in op.outputs.items()},
        attributes=attributes,
    )


def _head(plan: Plan, head: PlanGraph, num_ranks: int) -> PlanGraph:
    """A graph beside the base graph: what ranks have shares of is computed for each, and all else
    once, by rank 0. A share that is an input or an output is one of every rank."""
    weights = {tensor.name for tensor in plan.tensors if tensor.kind == "weight"}
    ops: list[PlanOp] = []
    for op in head.ops:
        is_shared = any(map(is_share, op.outputs.values()))
        for rank in range(num_ranks if is_shared else 1):

            def own(names: Mapping[str, str], rank: int = rank) -> dict[str, str]:
                return {
                    role: name_on(rank if name in weights or is_share(name) else 0, name)
                    for role, name in names.items()
                }

            made = replace(op, inputs=own(op.inputs), outputs=own(op.outputs))
            ops.append(replace(made, name=name_on(rank, op.name)))
    return replace(
        head,
        ops=tuple(ops),
        inputs=_ends(head.inputs, num_ranks),
        outputs=_ends(head.outputs, num_ranks),
    )


def _ends(names: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    found = {name: name_on(0, tensor) for name, tensor in names.items()}
    for name, tensor in names.items():
        others = range(1, num_ranks if is_share(tensor) else 1)
        found |= {name_on(rank, name): name_on(rank, tensor) for rank in others}
    return found


def _cache(cache: KvCacheSpec, num_ranks: int) -> KvCacheSpec:
    """The layers of rank 0, then those of rank 1: blocks are copied and moved over all of them."""
    layers, windows = cache.num_layers * num_ranks, cache.windows * num_ranks
    return replace(cache, num_layers=layers, windows=windows)
