"""All ranks of an engine on one GPU, for tests of what ranks compute: one plan in which every
operator of rank 0 is followed by that of rank 1, and so on.

So whatever a rank needs of others comes earlier on the one stream, nothing waits for what comes
later, and a graph of a step or of a round has the kernels of all ranks. To the rest of the runtime
it is an engine like any other, with the weights, activations and layers of all ranks; rank 0 has
the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from llmctl.builder.engine_format import KvCacheSpec, Plan, PlanOp, PlanTensor
from llmctl.errors import CorruptEngine, Unsupported
from llmctl.plugins.backends.cuda.kernel_spec import Parts
from llmctl.plugins.core.calls import OpCall

_ALIGNMENT = 256  # bytes, of each rank's part of the arena
_OF_RANK_0 = frozenset({"all_gather"})  # logits are read there alone


def name_on(rank: int, name: str) -> str:
    """A tensor or operator of one rank in the plan of all."""
    return f"rank{rank}/{name}"


def lockstep_plan(plans: Sequence[Plan]) -> Plan:
    """One plan of the plans of all ranks, which are equal. Raises CorruptEngine where they are not,
    and Unsupported for draft heads, of which each rank has a whole."""
    plan, *others = plans
    if any(other != plan for other in others):
        raise CorruptEngine(
            f"the engine has {len(plans)} ranks and a plan for each rank; all ranks have one plan",
            fix="build the engine again",
        )
    if plan.heads:
        raise Unsupported(
            f"--ranks-on-one-device: an engine of {len(plans)} ranks has draft heads, which are "
            "for ranks with a GPU each",
            fix="leave the option out, or use a draft engine instead of heads",
        )
    ranks = range(len(plans))
    stride = -(-plan.arena_bytes // _ALIGNMENT) * _ALIGNMENT
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
        rotary={name_on(r, name): found for r in ranks for name, found in plan.rotary.items()},
    )


def lockstep_parts(plan: Plan, num_ranks: int, calls: Sequence[OpCall]) -> Parts:
    """What operators over ranks read of the others. plan: of one rank; calls: those of the plan of
    all. Tensors are known by address, shape and dtype: ranks' parts of the arena are alike."""
    found: dict[object, tuple[torch.Tensor, ...]] = {}
    rest = iter(calls)
    for op in plan.ops:
        group = list(islice(rest, len(_ranks_of(op, num_ranks))))
        for role in op.outputs:
            parts = tuple(call.outputs[role] for call in group)
            if len(parts) == num_ranks:
                found.update(dict.fromkeys(map(_key, parts), parts))
    assert not list(rest), "the calls are not those of the plan of all ranks"

    def parts_of(x: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
        parts = found[_key(x)]
        assert len(parts) == ranks, f"{ranks} ranks of {len(parts)}"
        return parts

    return parts_of


def _ranks_of(op: PlanOp, num_ranks: int) -> range:
    return range(1 if op.op in _OF_RANK_0 else num_ranks)


def _key(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


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


def _cache(cache: KvCacheSpec, num_ranks: int) -> KvCacheSpec:
    """The layers of rank 0, then those of rank 1: blocks are copied and moved over all of them."""
    layers, windows = cache.num_layers * num_ranks, cache.windows * num_ranks
    return replace(cache, num_layers=layers, windows=windows)
