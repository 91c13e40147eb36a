"""Graphs of draft heads: weights that they share with the base graph become one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmctl.builder.network import Network
from llmctl.builder.packing import PackedVector
from llmctl.builder.sharding import RowShard, Whole
from llmctl.builder.sources import RotaryTable, Source


def link_heads(base: Network, heads: Sequence[Network]) -> list[Network]:
    """The heads with names that are one graph's alone but for what is shared: an input that another
    graph computes has the name of its output, and a weight made of the same bytes in the same
    order, of whatever graph, is stored once. All passes are behind them.
    """
    linked: list[Network] = []
    for head in heads:
        before = [base, *linked]
        names = _connected(before, head) | _shared(before, head)
        linked.append(_rename(head, names))
    return linked


def keep_whole(base: Network, head: Network) -> Network:
    """The head of an engine of several ranks: each has whole what no rank has rows of, and shares
    with the base graph what that has so, too, such as its embedding."""
    found = head.copy()
    shared = {name for name, source in head.sources.items() if source in base.sources.values()}
    found.sources = {
        name: source if name in shared or _is_own(source) else Whole(source)
        for name, source in head.sources.items()
    }
    return found


def _is_own(source: Source) -> bool:
    """Whether it says itself what a rank has: rows alone, packed or not, or a table that nobody
    reads."""
    own = source.vector if isinstance(source, PackedVector) else source
    return isinstance(own, RowShard | RotaryTable)


def _connected(before: Sequence[Network], head: Network) -> dict[str, str]:
    """Inputs that a graph before computes -> what it calls them."""
    names: dict[str, str] = {}
    graphs = {graph.name: graph for graph in before}
    for name, found in head.inputs.items():
        if found.source is not None:
            graph, output = graphs[found.source[0]], found.source[1]
            names[found.tensor] = graph.outputs[output].tensor
            here, there = head.tensors[found.tensor], graph.tensors[names[found.tensor]]
            assert (here.dtype, here.shape) == (there.dtype, there.shape), (
                f"the input {name} of {head.name} is {here}, what it comes from is {there}"
            )
    return names


def _shared(before: Sequence[Network], head: Network) -> dict[str, str]:
    """Weights that are there already -> their names there; those of others' names -> new ones."""
    names: dict[str, str] = {}
    stored = [item for graph in before for item in graph.sources.items()]
    taken = {name for graph in before for name in graph.tensors}
    for name, source in head.sources.items():
        same = [known for known, other in stored if other == source]
        if same:
            names[name] = same[0]
        elif name in taken:
            names[name] = f"{head.name}:{name}"
    return names


def _rename(network: Network, names: Mapping[str, str]) -> Network:
    def renamed(roles: Mapping[str, str]) -> dict[str, str]:
        return {role: names.get(tensor, tensor) for role, tensor in roles.items()}

    found = network.copy()
    tensors = ((names.get(name, name), tensor) for name, tensor in network.tensors.items())
    found.tensors = {name: replace(tensor, name=name) for name, tensor in tensors}
    found.sources = {names.get(name, name): source for name, source in network.sources.items()}
    found.nodes = [
        replace(node, inputs=renamed(node.inputs), outputs=renamed(node.outputs))
        for node in network.nodes
    ]
    for name, given in network.inputs.items():
        found.inputs[name] = replace(given, tensor=names.get(given.tensor, given.tensor))
    return found
