"""Network -> Plan: only plugin operators are left, and every activation has its place in the
arena."""

from __future__ import annotations

from collections.abc import Sequence

from llmctl.builder.engine_format import (
    TENSORRT_OP,
    KvCacheSpec,
    Plan,
    PlanGraph,
    PlanOp,
    PlanTensor,
)
from llmctl.builder.network import Network
from llmctl.builder.passes.memory import plan_memory
from llmctl.builder.sources import RotaryTable
from llmctl.plugins.core.operators import SPECS


def lower(
    network: Network,
    cache: KvCacheSpec,
    max_num_tokens: int,
    max_num_rows: int,
    alignment: int,
    heads: Sequence[Network] = (),
    max_num_requests: int = 0,
    max_num_beams: int = 0,
) -> Plan:
    """The plan of a completely rewritten network, and of the heads linked to it (heads.py)."""
    graphs = (network, *heads)
    foreign = {node.op for graph in graphs for node in graph.nodes} - set(SPECS) - {TENSORRT_OP}
    assert not foreign, f"no plugin executes {sorted(foreign)}"
    written = [t for graph in graphs for node in graph.nodes for t in node.outputs.values()]
    assert len(set(written)) == len(written), "two operators write one tensor"
    sizes = (max_num_tokens, max_num_rows, alignment)
    offsets, arena_bytes = plan_memory(network, *sizes, heads, max_num_requests, max_num_beams)
    found = {t.name: t for graph in graphs for t in graph.tensors.values()}
    sources = {name: s for graph in graphs for name, s in graph.sources.items()}
    rotary = {
        name: source.rope.definition(source.head_size)
        for name, source in sources.items()
        if isinstance(source, RotaryTable)
    }
    tensors = [
        PlanTensor(t.name, "weight", t.dtype, t.shape, is_stored=t.name not in rotary)
        if t.name in sources
        else PlanTensor(t.name, "activation", t.dtype, t.shape, offsets[t.name])
        for t in found.values()
    ]
    lowered = {graph.name: _lower(graph) for graph in graphs}
    base = lowered.pop(network.name)
    return Plan(
        tensors=tuple(tensors),
        ops=base.ops,
        kv_cache=cache,
        outputs=base.outputs,
        arena_bytes=arena_bytes,
        max_num_tokens=max_num_tokens,
        max_num_rows=max_num_rows,
        heads=lowered,
        max_num_requests=max_num_requests,
        max_num_beams=max_num_beams,
        head_caches=_head_caches(heads, cache),
        rotary=rotary,
    )


def _head_caches(heads: Sequence[Network], base: KvCacheSpec) -> dict[str, KvCacheSpec]:
    """The caches of heads that attend, by name: in blocks as long as the base graph's."""
    found: dict[str, KvCacheSpec] = {}
    for head in heads:
        own = head.cache
        if own is not None:
            spec = KvCacheSpec(
                *(len(own.windows), own.num_kv_heads, own.head_size),
                *(base.tokens_per_block, head.dtype, own.windows),
            )
            assert found.setdefault(own.name, spec) == spec, f"two caches are called {own.name}"
    return found


def _lower(network: Network) -> PlanGraph:
    ops = [
        PlanOp(n.op, n.name, dict(n.inputs), dict(n.outputs), dict(n.attributes), n.tactic)
        for n in network.nodes
    ]
    return PlanGraph(
        ops=tuple(ops),
        inputs={name: found.tensor for name, found in network.inputs.items()},
        outputs={name: found.tensor for name, found in network.outputs.items()},
        cache=network.cache.name if network.cache else "",
    )
