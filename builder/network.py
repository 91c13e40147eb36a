"""The graph of a model, which passes rewrite: tensors, nodes, weight sources.

Tensors are identified by name. Dimensions are integers or one of four symbols: "tokens" (rows of
the packed step), "rows" (rows that get logits), "requests" and "beams" (in draft heads: one row for
each sequence, and one for each beam of each sequence). A weight tensor has a source, which says how
its bytes come from the checkpoint; nothing is read while a network is built or rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from llmctl.builder.plan import BASE, Dim
from llmctl.builder.rope import Rope
from llmctl.builder.sources import Source

Attribute = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the network. dtype is torch's name for it."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}{list(self.shape)}".replace("'", "")


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: roles map to tensor names. `tactic` is empty until one is chosen."""

    op: str
    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    tactic: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the runtime reads after each step."""

    tensor: str
    for_all_tokens: bool = False  # else for the rows that get logits


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that is there before the network runs: an output of another graph, as (graph,
    output), or one that whoever runs the network writes, perhaps of rows of outputs of the base
    graph."""

    tensor: str
    source: tuple[str, str] | None = None
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadCache:
    """The KV cache of a graph beside the base graph, in the model dtype. Graphs that name the same
    one share it."""

    name: str
    num_kv_heads: int
    head_size: int
    windows: tuple[int, ...]  # of each layer: the attention window in tokens, 0 for full attention
    rope: Rope


class _Index:
    """Who writes and who reads each tensor of a list of nodes: looking through all of them for each
    question took most of the time that planning a large model took."""

    _NEAR = 64  # passes go through a network in order: what they replace is near what they did last

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.size, self.last = len(nodes), nodes[-1] if nodes else None
        self._place = 0
        self._readers: dict[str, list[Node]] = {}
        self._writers: dict[str, list[Node]] = {}
        for node in nodes:
            self._add(node)

    def is_of(self, nodes: list[Node]) -> bool:
        """Whether it is of this list, to which nothing was appended, and whose last node is the
        same: nodes within a list change in `replaced` alone."""
        last = nodes[-1] if nodes else None
        return nodes is self.nodes and len(nodes) == self.size and last is self.last

    def readers(self, name: str) -> list[Node]:
        """In execution order."""
        return self._in_order(self._readers.get(name, []))

    def writer(self, name: str) -> Node | None:
        """The first one."""
        return next(iter(self._in_order(self._writers.get(name, []))), None)

    def replaced(self, old: Iterable[Node], new: Iterable[Node], at: Node) -> list[Node]:
        """Another list, of which this is the index from now on, with `new` in the place of `at`."""
        nodes, added = list(self.nodes), list(new)
        place = self._find(at)
        gone = {id(node): node for node in old}
        places = {self._find(node) for node in gone.values()}
        nodes[place : place + 1] = added
        for other in sorted(places - {place}, reverse=True):
            del nodes[other + len(added) - 1 if other > place else other]
        for node in gone.values():
            for tensors, table in ((node.inputs, self._readers), (node.outputs, self._writers)):
                for name in set(tensors.values()):
                    table[name] = [known for known in table[name] if known is not node]
        self.nodes, self._place = nodes, place
        self.size, self.last = len(nodes), nodes[-1] if nodes else None
        for node in added:
            self._add(node)
        return nodes

    def _add(self, node: Node) -> None:
        for tensors, table in ((node.inputs, self._readers), (node.outputs, self._writers)):
            for name in set(tensors.values()):
                table.setdefault(name, []).append(node)

    def _in_order(self, nodes: list[Node]) -> list[Node]:
        return list(nodes) if len(nodes) < 2 else sorted(nodes, key=self._find)

    def _find(self, wanted: Node) -> int:
        first = max(0, self._place - self._NEAR)
        for place in range(first, min(len(self.nodes), self._place + self._NEAR)):
            if self.nodes[place] is wanted:
                return place
        return next(place for place, node in enumerate(self.nodes) if node is wanted)


LOGITS = "logits"
OUTPUT_OP = "output"  # of the nodes that stand for outputs among the consumers of a tensor


@dataclass(slots=True)
class Network:
    """A recorded model. Passes take one and return another; nodes are in execution order."""

    dtype: str  # the model dtype T
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)  # weights only
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)  # by name; LOGITS is one of the base's
    inputs: dict[str, Input] = field(default_factory=dict)  # by name; the base graph has none
    name: str = BASE  # of the graph
    cache: HeadCache | None = None  # None: the base graph's, or no attention
    _known: _Index | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def logits(self) -> str:
        """The tensor of the logits."""
        return self.outputs[LOGITS].tensor

    def copy(self) -> Network:
        """A network that can be rewritten without touching this one."""
        return replace(
            self,
            tensors=dict(self.tensors),
            sources=dict(self.sources),
            nodes=list(self.nodes),
            outputs=dict(self.outputs),
            inputs=dict(self.inputs),
        )

    def add_activation(self, name: str, dtype: str, shape: tuple[Dim, ...]) -> Tensor:
        """Declare a value that a node will write."""
        assert name not in self.tensors, f"two tensors are called {name}"
        self.tensors[name] = Tensor(name, dtype, shape)
        return self.tensors[name]

    def add_weight(self, name: str, source: Source) -> Tensor:
        """Declare a value that comes from the checkpoint; the same name twice is one weight."""
        known = self.sources.setdefault(name, source)
        assert known == source, f"two different weights are called {name}"
        self.tensors[name] = Tensor(name, source.dtype, source.shape)
        return self.tensors[name]

    def producer(self, name: str) -> Node | None:
        """The node that writes a tensor; None for weights and inputs."""
        return self._index().writer(name)

    def consumers(self, name: str) -> list[Node]:
        """The nodes that read a tensor, in execution order; then one node for each output it is, so
        that no pass removes a tensor that only the runtime reads."""
        return self._index().readers(name) + [
            Node(OUTPUT_OP, output, {"x": name}, {})
            for output, found in self.outputs.items()
            if found.tensor == name
        ]

    def replace_nodes(self, old: Iterable[Node], new: Iterable[Node], at: Node) -> None:
        """Remove `old` and put `new` where `at` (one of `old`) was."""
        gone = list(old)
        assert any(node is at for node in gone)
        self.nodes = self._index().replaced(gone, new, at)

    def redirect(self, old: str, new: str) -> None:
        """Make every reader of tensor `old` read `new` instead."""
        self.nodes = [
            replace(n, inputs={role: new if t == old else t for role, t in n.inputs.items()})
            if old in n.inputs.values()
            else n
            for n in self.nodes
        ]
        self.outputs = {
            name: replace(found, tensor=new) if found.tensor == old else found
            for name, found in self.outputs.items()
        }

    def prune(self) -> None:
        """Drop tensors and sources that no node touches."""
        used = {t for n in self.nodes for t in (*n.inputs.values(), *n.outputs.values())}
        self.tensors = {name: t for name, t in self.tensors.items() if name in used}
        self.sources = {name: s for name, s in self.sources.items() if name in used}

    def _index(self) -> _Index:
        if self._known is None or not self._known.is_of(self.nodes):
            self._known = _Index(self.nodes)
        return self._known

    def __str__(self) -> str:
        """One line a node: outputs = op(inputs) {attributes}."""
        return "\n".join(self._line(node) for node in self.nodes)

    def _line(self, node: Node) -> str:
        outputs = ", ".join(str(self.tensors[name]) for name in node.outputs.values())
        inputs = ", ".join(f"{role}={name}" for role, name in node.inputs.items())
        attributes = " ".join(f"{key}={value}" for key, value in node.attributes.items())
        tail = [attributes, node.tactic and f"[{node.tactic}]"]
        return "  ".join([f"{outputs} = {node.op}({inputs})", *filter(None, tail)])


_current: ContextVar[Network] = ContextVar("network")


@contextmanager
def recording(network: Network) -> Iterator[Network]:
    """Within the block, `functional` records into `network`."""
    token = _current.set(network)
    try:
        yield network
    finally:
        _current.reset(token)


def current() -> Network:
    """The network being recorded."""
    return _current.get()
