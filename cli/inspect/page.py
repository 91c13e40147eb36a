"""An engine as one self-contained page: `llmctl inspect DIR --graph out.html`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from llmctl.cli.inspect.dot import Edge, edges
from llmctl.cli.inspect.engine_text import (
    SHORT_DTYPES,
    group_name,
    memory_rows,
    microseconds,
    step_line,
    summary_rows,
)
from llmctl.cli.table import size

ROW = 52  # height of an operator, pixels; the lines beside the rows are drawn with it
GUTTER = 72  # width of the room for those lines, pixels
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #5b6673; --line: #d4dae1;
  --card: #ffffff; --back: #f3f5f8; --bar: #3b73c9; --chip: #e6edf8; --arc: #b25c1e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b3; --line: #37404c;
  --card: #1d232b; --back: #14181e; --bar: #5b93e6; --chip: #2a3648; --arc: #e09a62; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 24px; background: var(--back);
  color: var(--ink); font: 14px/1.4 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
h2 small, .soft { color: var(--soft); font-weight: normal; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px 18px; margin-bottom: 18px; overflow-x: auto; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 2px 18px 2px 0; vertical-align: top; font-weight: normal; }
th { color: var(--soft); white-space: nowrap; }
td.wide { overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ops { position: relative; min-width: 1060px; }
.ops svg { position: absolute; left: 0; top: 24px; }
.head, .op { display: grid; margin-left: var(--gutter); column-gap: 14px; align-items: center;
  grid-template-columns: 186px 212px minmax(210px, 1fr) 72px 72px 66px 120px; }
.head { height: 24px; color: var(--soft); font-size: 12px; }
.op { height: var(--row); border-top: 1px solid var(--line); }
.op b { font-weight: 600; overflow-wrap: anywhere; }
.chip { display: inline-block; background: var(--chip); border-radius: 4px; padding: 0 6px;
  margin: 1px 3px 1px 0; font-size: 12px; }
.flow { font: 12px/1.35 ui-monospace, "DejaVu Sans Mono", monospace; }
.flow span { white-space: nowrap; }
.bar { height: 12px; background: var(--line); border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--bar); }
summary { cursor: pointer; font-weight: 600; font-size: 16px; }
details table { margin-top: 10px; font-size: 12px; }
"""

_EXPLAINED = (
    "Predicted times are bytes read over the bandwidth that decoding steps of this size "
    "reach, as measured. Operators are in the order in which they run, with a line from each whose "
    "output they read. The bar is its share of the step, with all layers of the group. "
    "&ldquo;rows&rdquo; are the tokens that get logits."
)


def draw(engine: Mapping[str, Any]) -> str:
    """The page as text."""
    return "".join(_parts(engine))


def _parts(engine: Mapping[str, Any]) -> Iterator[str]:
    title = escape(str(engine["path"]))
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>llmctl inspect {title}</title><style>{_STYLE}</style></head>"
    yield f'<body style="--row: {ROW}px; --gutter: {GUTTER}px"><h1>{title}</h1>'
    yield _section("Engine", _table(summary_rows(engine["config"])))
    yield _section("Memory", _table(memory_rows(engine)))
    step = escape(step_line(engine["step"]))
    yield f"<section><h2>One step</h2><div>{step}</div>"
    yield f'<div class="soft">{_EXPLAINED}</div></section>'
    by_group: dict[int, list[Edge]] = {}
    for edge in edges(engine):
        by_group.setdefault(edge.target[0], []).append(edge)
    for at in range(len(engine["layers"])):
        yield _group(engine, at, by_group.get(at, []))
    yield _kernels(engine["kernels"])
    yield _section(
        "Files", _table([(file["name"], size(file["bytes"])) for file in engine["files"]])
    )
    yield "</body></html>\n"


def _group(engine: Mapping[str, Any], at: int, incoming: Sequence[Edge]) -> str:
    group = engine["layers"][at]
    count = max(len(group["layers"]), 1)
    ops = group["ops"]
    whole = engine["step"]["read_bytes"]
    read = sum(op["read_bytes"] for op in ops)
    cost = f"{size(read)} read" + (" a layer" if count > 1 else "")
    if ops[0]["predicted_us"] is not None:
        cost += f", {microseconds(sum(op['predicted_us'] for op in ops))} us"
    cost += f", {100 * read * count / whole:.1f} % of the step"
    names = ("operator", "does", "from &rarr; to", "weights", "reads", "us", "share of the step")
    head = "".join(f"<span>{name}</span>" for name in names)
    rows = "".join(_op(op, op["read_bytes"] * count / whole) for op in ops)
    return (
        f"<section><h2>{escape(group_name(group['layers']))} <small>{cost}</small></h2>"
        f'<div class="ops"><div class="head">{head}</div>'
        f"{_arcs(at, len(ops), incoming)}{rows}</div></section>"
    )


def _op(op: Mapping[str, Any], share: float) -> str:
    predicted = op["predicted_us"]
    chips = "".join(f'<span class="chip">{escape(part)}</span>' for part in op["fuses"])
    flow = f"{_values(op['inputs'], is_input=True)} &rarr; {_values(op['outputs'])}"
    weights = size(op["weight_bytes"]) if op["weight_bytes"] else "&ndash;"
    time = "&ndash;" if predicted is None else microseconds(predicted)
    hint = escape(f"{op['name']}\ntactic: {op['tactic']}", quote=True)
    return (
        f'<div class="op" title="{hint}"><b>{escape(op["op"])}</b><span>{chips}</span>'
        f'<span class="flow">{flow}</span><span class="number">{weights}</span>'
        f'<span class="number">{size(op["read_bytes"])}</span><span class="number">{time}</span>'
        f'<span class="bar" title="{100 * share:.2f} % of the step">'
        f'<i style="width: {100 * share:.2f}%"></i></span></div>'
    )


def _values(tensors: Mapping[str, Any], is_input: bool = False) -> str:
    """The activations among an operator's tensors."""
    shown = [
        f"<span>{SHORT_DTYPES[t['dtype']]}[{','.join(map(str, t['shape']))}]</span>"
        for t in tensors.values()
        if not is_input or t["kind"] == "activation"
    ]
    return " ".join(shown) or "token ids"


def _arcs(at: int, num_ops: int, incoming: Iterable[Edge]) -> str:
    """Lines at the left of a group's rows, to every operator from those that it reads."""
    paths = "".join(
        f'<path d="{_arc(at, edge)}" marker-end="url(#end)">'
        f"<title>{escape(edge.role)}</title></path>"
        for edge in incoming
    )
    return (
        f'<svg width="{GUTTER}" height="{num_ops * ROW}" fill="none" stroke="var(--arc)" '
        'stroke-width="1.6"><defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 L8 4 L0 8 z" '
        f'fill="var(--arc)" stroke="none"/></marker></defs>{paths}</svg>'
    )


def _arc(at: int, edge: Edge) -> str:
    """The path of one line, wider the more rows it passes; from above when another group wrote."""
    right, end = GUTTER - 8, edge.target[1] * ROW + ROW // 2 - 6
    rows = edge.target[1] - (edge.source[1] if edge.source[0] == at else -1)
    left = right - min(10 * rows, GUTTER - 14)
    if edge.source[0] != at:
        return f"M {left} 0 V {end - 12} Q {left} {end} {right} {end}"
    start = edge.source[1] * ROW + ROW // 2 + 6
    return f"M {right} {start} C {left} {start}, {left} {end}, {right} {end}"


def _kernels(kernels: Sequence[Mapping[str, Any]]) -> str:
    if not kernels:
        return ""
    names = ("name", "registers", "threads", "shared_bytes", "local_bytes", "num_bytes")
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(kernel[name]))}</td>" for name in names) + "</tr>"
        for kernel in kernels
    )
    return (
        f"<section><details><summary>Kernels ({len(kernels)})</summary>"
        f"<table><tr>{head}</tr>{rows}</table></details></section>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f'<tr><th>{escape(a)}</th><td class="wide">{escape(b)}</td></tr>' for a, b in rows)
    return f"<table>{''.join(cells)}</table>"
