"""Network -> Plan: only plugin operators are left, and every activation has its place in the
arena."""

from __future__ import annotations

from llmctl.builder.engine_format import TENSORRT_OP, KvCacheSpec, Plan, PlanOp, PlanTensor
from llmctl.builder.network import Network
from llmctl.builder.passes.memory import plan_memory
from llmctl.plugins.core.operators import SPECS


def lower(
    network: Network, cache: KvCacheSpec, max_num_tokens: int, max_num_rows: int, alignment: int
) -> Plan:
    """The plan of a completely rewritten network."""
    foreign = {node.op for node in network.nodes} - set(SPECS) - {TENSORRT_OP}
    assert not foreign, f"no plugin executes {sorted(foreign)}"
    offsets, arena_bytes = plan_memory(network, max_num_tokens, max_num_rows, alignment)
    tensors = [
        PlanTensor(t.name, "weight", t.dtype, t.shape)
        if t.name in network.sources
        else PlanTensor(t.name, "activation", t.dtype, t.shape, offsets[t.name])
        for t in network.tensors.values()
    ]
    ops = [
        PlanOp(n.op, n.name, dict(n.inputs), dict(n.outputs), dict(n.attributes), n.tactic)
        for n in network.nodes
    ]
    return Plan(
        tensors=tuple(tensors),
        ops=tuple(ops),
        kv_cache=cache,
        outputs={name: found.tensor for name, found in network.outputs.items()},
        arena_bytes=arena_bytes,
        max_num_tokens=max_num_tokens,
        max_num_rows=max_num_rows,
    )
