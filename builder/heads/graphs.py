"""Graphs beside the base graph as a build mode records them, and what they ask of the base graph.

    with recording(Network(dtype, name="medusa")) as head:
        hidden = graph_input("hidden", "rows", model.hidden_size, source=(BASE, HIDDEN))
        ...
        graph_output("logits", linear(x, weight, name="medusa.lm_head", dtype="float32"))

Names of nodes begin with the graph's. A weight that the base graph has too, as its embedding or its
output projection, is recorded under the same checkpoint name and stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmctl.builder.config import BuildRequest
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network
from llmctl.builder.plan import BASE
from llmctl.builder.speculative_modes import SPECULATIVE_MODES, Facts
from llmctl.errors import Unsupported
from llmctl.plugins.backends.backend import BACKENDS


def record_heads(
    request: BuildRequest, model: ModelConfig, dtype: str, facts: Facts, backend: str
) -> tuple[list[Network], tuple[str, ...]]:
    """(the heads of the request's mode, the outputs beside logits of the base graph: those asked
    for and those that heads read). Raises Unsupported where the backend has neither."""
    width = request.max_non_leaves_per_layer or 1
    if width > 1 and not BACKENDS[backend].continues_trees:
        able = ", ".join(name for name, row in BACKENDS.items() if row.continues_trees)
        raise Unsupported(
            f"--max-non-leaves-per-layer is {width}; trees that a head drafts level by level are "
            f"not available on backend {backend!r}; they are on {able}",
            fix="leave it out: the head drafts chains",
        )
    heads = list(SPECULATIVE_MODES[request.mode].record_heads(model, dtype, facts))
    assert len({BASE, *(head.name for head in heads)}) == 1 + len(heads), "names of graphs"
    inputs = [found for head in heads for found in head.inputs.values()]
    sources = filter(None, (found.source for found in inputs))
    read = [output for graph, output in sources if graph == BASE]
    read += [output for found in inputs for output in found.beside]
    outputs = tuple(dict.fromkeys((*request.outputs, *read)))
    if BACKENDS[backend].compiles_plans and (outputs or heads):
        what = ", ".join((*(f"head {head.name}" for head in heads), *outputs))
        raise Unsupported(
            f"outputs beside logits ({what}) are not available on backend {backend!r}",
            fix="--backend cuda or --backend cpu",
        )
    for head in heads:
        attends = any(node.op == "gpt_attention" for node in head.nodes)
        assert attends == (head.cache is not None), f"{head.name} has a cache where it attends"
    return heads, outputs


def join(graphs: Sequence[Network]) -> Network:
    """All graphs as one network, for what is asked of every weight; it is not run."""
    base, *heads = graphs
    joined = base.copy()
    for head in heads:
        joined.nodes += head.nodes
        joined.tensors.update(head.tensors)
        for name, source in head.sources.items():
            joined.add_weight(name, source)
    return replace(joined, inputs={}, outputs=base.outputs)
