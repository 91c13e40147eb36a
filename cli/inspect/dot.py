"""The operators of an engine as a graph, in Graphviz's language; layers that are alike once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llmctl.cli.inspect.engine_text import group_name, microseconds
from llmctl.cli.table import size


class Edge(NamedTuple):
    """A value that one operator writes and another reads, each as (group, operator in it)."""

    source: tuple[int, int]
    target: tuple[int, int]
    role: str


def edges(engine: Mapping[str, Any]) -> Iterator[Edge]:
    """All edges between the operators shown. What a layer reads of the one before it comes from
    the nearest earlier group that has an operator of that name."""
    names = [[op["name"] for op in group["ops"]] for group in engine["layers"]]
    for at, group in enumerate(engine["layers"]):
        for index, op in enumerate(group["ops"]):
            for role, producer in op["producers"].items():
                yield Edge(_find(names, at, index, producer), (at, index), role)


def _find(names: list[list[str]], at: int, index: int, producer: str) -> tuple[int, int]:
    """Where the operator called `producer` by operator `index` of group `at` is shown."""
    if producer in names[at][:index]:
        return at, names[at].index(producer)
    wanted = producer.replace(".layers.N-1.", ".layers.N.")
    return next((g, names[g].index(wanted)) for g in range(at - 1, -1, -1) if wanted in names[g])


def draw(engine: Mapping[str, Any]) -> str:
    """The graph as text for `dot -Tsvg`."""
    return "\n".join(_lines(engine)) + "\n"


def _lines(engine: Mapping[str, Any]) -> Iterator[str]:
    yield "digraph engine {"
    yield '  node [shape=box, style=filled, fillcolor=white, fontname="sans-serif", fontsize=11];'
    yield '  edge [fontname="sans-serif", fontsize=9, color=gray40];'
    yield f'  graph [fontname="sans-serif", labeljust=l, label={_quote(str(engine["path"]))}];'
    for at, group in enumerate(engine["layers"]):
        yield f"  subgraph cluster_{at} {{"
        yield f"    style=filled; color=gray90; label={_quote(group_name(group['layers']))};"
        for index, op in enumerate(group["ops"]):
            yield f"    {_node(at, index)} [label={_quote(_label(op))}];"
        yield "  }"
    for edge in edges(engine):
        text = "" if edge.role == "x" else f" [label={_quote(edge.role)}]"
        yield f"  {_node(*edge.source)} -> {_node(*edge.target)}{text};"
    yield "}"


def _label(op: Mapping[str, Any]) -> str:
    cost = f"reads {size(op['read_bytes'])}"
    if op["predicted_us"] is not None:
        cost += f", {microseconds(op['predicted_us'])} us"
    return "\n".join([op["op"], " + ".join(op["fuses"]), cost])


def _node(group: int, index: int) -> str:
    return f"g{group}_{index}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
