"""Split a network at llmctl's own kernels, into pieces that TensorRT compiles.

The part between two attentions is the same computation in every layer, and weights are inputs of
it; so the layers of a model share one piece, bound to other weights each time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmctl.builder.engine_format import TENSORRT_OP, Dim
from llmctl.builder.network import Network, Node, Tensor

# Operators of llmctl's kernels: attention always, linear layers if they were packed for them.
OUTSIDE = frozenset(
    {
        "rope_kv_write",
        "paged_attention",
        "packed_linear",
        "packed_linear_swiglu",
        "packed_linear_rope_kv",
    }
)
STEP = "step."  # prefix of the names of a step's arrays among a node's inputs
_STEP_ARRAYS: Mapping[str, tuple[str, Dim]] = {  # op -> the array it reads
    "embedding": ("token_ids", "tokens"),
    "gather_rows": ("logit_rows", "rows"),
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor that the caller of a piece binds. Shapes are those of TensorRT: vectors are rows."""

    name: str
    is_input: bool
    dtype: str
    shape: tuple[Dim, ...]
    alias: str = ""  # an output that must be bound to the memory of this input


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes that become one TensorRT network; names are those of its first use, without layers."""

    name: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, Tensor]
    bindings: tuple[Binding, ...]
    step: tuple[str, ...] = ()  # bindings that are arrays of the step
    outputs: Mapping[str, str] = field(default_factory=dict)  # binding -> tensor of another name
    num_ranks: int = 1


def cut(network: Network, num_ranks: int) -> tuple[Network, tuple[Piece, ...]]:
    """(the network with each run of other nodes as one node, the distinct pieces in order)."""
    runs = _runs(network)
    found: dict[str, Piece] = {}  # by what they compute
    uses: list[tuple[Piece | None, list[Node], Mapping[str, str]]] = []
    for nodes in runs:
        if nodes[0].op in OUTSIDE:
            uses.append((None, nodes, {}))
            continue
        piece, names = _piece(network, nodes, num_ranks)
        uses.append((found.setdefault(repr(piece), piece), nodes, names))
    named = _name(list(found.values()), [piece for piece, _, _ in uses if piece is not None])
    rewritten: list[Node] = []
    for used, nodes, names in uses:
        rewritten += nodes if used is None else [_use(named[id(used)], nodes, names)]
    result = network.copy()
    result.nodes = rewritten
    step = {name for node in rewritten for name in node.inputs.values() if name.startswith(STEP)}
    result.prune()
    assert not step & set(result.tensors)
    return result, tuple(named.values())


def _runs(network: Network) -> list[list[Node]]:
    """The nodes in order, consecutive ones inside together, each one outside alone."""
    runs: list[list[Node]] = []
    for node in network.nodes:
        if runs and node.op not in OUTSIDE and runs[-1][0].op not in OUTSIDE:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _piece(
    network: Network, nodes: Sequence[Node], num_ranks: int
) -> tuple[Piece, Mapping[str, str]]:
    """(the piece without a name, binding -> tensor of this use)."""
    first = _first_layer(nodes) or 0

    def short(name: str) -> str:
        match = _LAYER.search(name)
        if match is None:
            return name
        return f"layer{int(match[1]) - first}.{name[match.end() :]}"  # -1: made by gather_rows

    made = dict.fromkeys(t for node in nodes for t in node.outputs.values())
    read = dict.fromkeys(t for node in nodes for t in node.inputs.values() if t not in made)
    inside = {id(node) for node in nodes}
    left = dict.fromkeys(
        t
        for node in nodes
        for t in node.outputs.values()
        if t == network.logits or any(id(n) not in inside for n in network.consumers(t))
    )
    names: dict[str, str] = {}  # tensor -> what it is called in the piece
    for tensor in (*read, *made):
        names[tensor] = short(tensor)
    for tensor in read:
        if tensor not in network.sources:
            names[tensor] = _incoming(network, tensor)
    for tensor in left:
        names[tensor] = _outgoing(network, tensor)
    bindings, step = [], []
    for tensor in read:
        known = network.tensors[tensor]
        shape = as_row(known.shape)
        bindings.append(Binding(names[tensor], True, known.dtype, shape))
    for op in dict.fromkeys(node.op for node in nodes):
        if op in _STEP_ARRAYS:
            array, dim = _STEP_ARRAYS[op]
            bindings.append(Binding(array, True, "int32", (dim,)))
            step.append(array)
    for tensor in left:
        known = network.tensors[tensor]
        bindings.append(Binding(names[tensor], False, known.dtype, known.shape))
    renamed = tuple(
        replace(
            node,
            name=short(node.name),
            inputs={role: names[t] for role, t in node.inputs.items()},
            outputs={role: names[t] for role, t in node.outputs.items()},
        )
        for node in nodes
    )
    tensors = {
        names[t]: replace(network.tensors[t], name=names[t]) for t in dict.fromkeys((*read, *made))
    }
    mapping = {names[t]: t for t in (*read, *left)} | {array: STEP + array for array in step}
    piece = Piece("", renamed, tensors, tuple(bindings), tuple(step), num_ranks=num_ranks)
    return piece, mapping


def _first_layer(nodes: Sequence[Node]) -> int | None:
    """The lowest layer that a node belongs to."""
    own = [node for node in nodes if node.op != "gather_rows"]  # named after what they gather
    return min((int(m[1]) for node in own if (m := _LAYER.search(node.name))), default=None)


def _incoming(network: Network, tensor: str) -> str:
    """What an activation that enters a piece is called there."""
    producer = network.producer(tensor)
    assert producer is not None
    if producer.op == "paged_attention":
        return "attention"
    return "hidden" if _is_residual(network, tensor) else f"in.{_LAYER.sub('.', tensor)}"


def _outgoing(network: Network, tensor: str) -> str:
    """What an activation that leaves a piece is called there."""
    if tensor == network.logits:
        return "logits"
    if any(node.op == "rope_kv_write" for node in network.consumers(tensor)):
        return "qkv"
    return "hidden_out" if _is_residual(network, tensor) else f"out.{_LAYER.sub('.', tensor)}"


def _is_residual(network: Network, tensor: str) -> bool:
    """Whether a tensor is the residual stream: some norm adds to it."""
    readers = network.consumers(tensor)
    gathered = [t for n in readers if n.op == "gather_rows" for t in n.outputs.values()]
    return any(
        node.inputs.get("residual") in (tensor, *gathered)
        for name in (tensor, *gathered)
        for node in network.consumers(name)
    )


def as_row(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape that a vector has in TensorRT; other shapes stay."""
    return (1, *shape) if len(shape) == 1 and isinstance(shape[0], int) else shape


def _name(pieces: Sequence[Piece], order: Sequence[Piece]) -> dict[int, Piece]:
    """Pieces by identity, named first, middle (numbered where there are several) and last."""
    middles = [p for p in pieces if p is not order[0] and p is not order[-1]]
    names = {id(order[0]): "first", id(order[-1]): "last"}
    for index, piece in enumerate(middles):
        names[id(piece)] = "middle" if len(middles) == 1 else f"middle{index + 1}"
    return {id(piece): replace(piece, name=names[id(piece)]) for piece in pieces}


def _use(piece: Piece, nodes: Sequence[Node], names: Mapping[str, str]) -> Node:
    """One run of a piece, named after the layer that it begins in."""
    first = _first_layer(nodes)
    layer = "model." if first is None or piece.name == "first" else f"model.layers.{first}."
    inputs = {b.name: names[b.name] for b in piece.bindings if b.is_input}
    outputs = {b.name: names[b.name] for b in piece.bindings if not b.is_input}
    return Node(TENSORRT_OP, f"{layer}{piece.name}", inputs, outputs, {"piece": piece.name})
