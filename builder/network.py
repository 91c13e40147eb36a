"""The graph that a model is recorded into and that passes rewrite: tensors, nodes, weight sources.

Tensors are identified by name. Dimensions are integers or one of four symbols: "tokens" (rows of
the packed step), "rows" (rows that get logits), "requests" and "beams" (rows of heads that compute
one for each sequence, and one for each beam of each sequence). A weight tensor has a source, which
says how its bytes come from the checkpoint; nothing is read while a network is built or rewritten.
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
        return next((node for node in self.nodes if name in node.outputs.values()), None)

    def consumers(self, name: str) -> list[Node]:
        """The nodes that read a tensor, in execution order; then one node for each output it is, so
        that no pass removes a tensor that only the runtime reads."""
        readers = [node for node in self.nodes if name in node.inputs.values()]
        return readers + [
            Node(OUTPUT_OP, output, {"x": name}, {})
            for output, found in self.outputs.items()
            if found.tensor == name
        ]

    def replace_nodes(self, old: Iterable[Node], new: Iterable[Node], at: Node) -> None:
        """Remove `old` and put `new` where `at` (one of `old`) was."""
        gone = {id(node) for node in old}
        assert id(at) in gone
        rewritten: list[Node] = []
        for node in self.nodes:
            if node is at:
                rewritten.extend(new)
            elif id(node) not in gone:
                rewritten.append(node)
        self.nodes = rewritten

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
