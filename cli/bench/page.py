"""--report: the benchmark as one self-contained HTML page with charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from llmctl.cli.bench import svg
from llmctl.cli.bench.hardware import EXCEEDED
from llmctl.cli.bench.metrics import DEFINITIONS, e2e_ms, itl_ms, tpot_ms, ttft_ms
from llmctl.cli.bench.page_style import STYLE
from llmctl.cli.bench.records import Recording
from llmctl.cli.bench.report import main_way
from llmctl.cli.bench.session import Measured
from llmctl.cli.bench.table import COLUMNS, banner, figures, heading, notes, number, spreads
from llmctl.cli.bench.timeline import MOST_RESPONSES, timeline, typical_request

MARKS = ("p50", "p90", "p99")


def page(measured: Measured, report: Mapping[str, Any]) -> str:
    """The whole document."""
    recording = main_way(measured, report).recording
    title = f"llmctl bench {report['command']}: {report['engine']['model']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(heading(report))}</p>',
        *(f'<p class="banner">{escape(line)}</p>' for line in banner(report)),
        _tiles(report),
        *(f'<p class="note">{escape(line)}</p>' for line in notes(report)),
    ]
    if report.get("sweep") is not None:
        body.append(_sweep(report["sweep"]))
    body.append(_percentile_table(report))
    if recording.done:
        body.append(_section("Latency distribution", _latencies(recording, report)))
    if report["decoding_stats"] is not None:
        body.append(_section("Drafts", _drafts(report["decoding_stats"])))
    request = typical_request(recording)
    if request is not None:
        many = len(request.arrivals) > MOST_RESPONSES
        note = f"; its first {MOST_RESPONSES} responses" if many else ""
        body.append(
            _section(
                f"Timeline of request {request.index}, the median one end to end{note}",
                [
                    timeline(request, recording)
                    + _legend("prompt=step that reads prompts", "draft=draft", "verify=verify")
                ],
                wide=True,
            )
        )
    body += _limit(report)
    if recording.steps:
        body.append(_section("Steps and KV cache", _steps(recording, report)))
    body += [_facts(report), _definitions()]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, parts: Iterable[str], *, wide: bool = False) -> str:
    css = "charts wide" if wide else "charts"
    figures_ = "".join(f"<figure>{part}</figure>" for part in parts)
    return f'<section><h2>{escape(title)}</h2><div class="{css}">{figures_}</div></section>'


def _tiles(report: Mapping[str, Any]) -> str:
    """The most important figures."""
    performance, streaming = report["performance"], report["streaming_metrics"]
    found = [
        ("output", performance.get("system_output_throughput_tok_s"), "tok/s"),
        ("per user", performance.get("output_throughput_per_user_tok_s"), "tok/s"),
        ("first token, p50", (streaming["ttft_ms"] or {}).get("p50"), "ms"),
        ("per output token, p50", (streaming["tpot_ms"] or {}).get("p50"), "ms"),
        ("end to end, p99", (streaming["e2e_ms"] or {}).get("p99"), "ms"),
    ]
    if report["decoding_stats"] is not None:
        found.append(
            ("acceptance length", report["decoding_stats"]["acceptance_length"], "tokens/round")
        )
    if report.get("baseline") is not None and report["baseline"]["speedup"] is not None:
        found.append(("with drafts", report["baseline"]["speedup"]["total_time_ratio"], "x"))
    cells = (
        f"<div><b>{escape(number(value))}</b> <i>{unit}</i><span>{escape(label)}</span></div>"
        for label, value, unit in found
        if value is not None
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _percentile_table(report: Mapping[str, Any]) -> str:
    head = "".join(
        f"<th>{name.replace('imum', '').replace('average', 'mean')}</th>" for name in COLUMNS
    )
    rows = "".join(
        f"<tr><th>{escape(label)}</th><td>{unit}</td>"
        + "".join(f"<td>{number(spread[name])}</td>" for name in COLUMNS)
        + "</tr>"
        for label, unit, spread in spreads(report)
    )
    return (
        "<section><h2>Percentiles</h2><table><thead><tr><th></th><th>unit</th>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _latencies(recording: Recording, report: Mapping[str, Any]) -> Iterator[str]:
    """One histogram a metric, with its percentiles."""
    done = recording.done
    tpots = [value for value in map(tpot_ms, done) if value is not None]
    found = {
        ("time to first token, ms", "ttft_ms"): [ttft_ms(item) for item in done],
        ("end to end, ms", "e2e_ms"): [e2e_ms(item) for item in done],
        ("time per output token, ms", "tpot_ms"): tpots,
        ("inter-token latency, ms", "itl_ms"): [gap for item in done for gap in itl_ms(item)],
    }
    for (label, key), values in found.items():
        spread = report["streaming_metrics"][key]
        if values and spread is not None:
            yield svg.histogram(values, label, [(name, spread[name]) for name in MARKS])


def _drafts(decoding: Mapping[str, Any]) -> Iterator[str]:
    rates = decoding["acceptance_at_position"]
    yield svg.bars(
        [str(index) for index in range(1, len(rates) + 1)],
        [100 * rate for rate in rates],
        "draft position",
        "% of rounds that kept it",
        ceiling=118,
        show=lambda value: f"{value:.0f}",
        line=[None if c is None else 100 * c for c in decoding["conditional_acceptance"]],
    ) + _legend("bar=kept", "second=kept, if the one before it was")
    counts = decoding["tokens_per_round"]
    total = sum(counts.values())
    yield svg.bars(
        list(counts),
        [100 * count / total for count in counts.values()],
        "tokens per round, the target's own included",
        "% of rounds",
        show=lambda value: f"{value:.0f}" if value >= 1 else f"{value:.1f}",
    )


def _limit(report: Mapping[str, Any]) -> Iterator[str]:
    limit, times = report["hardware_limit"], report["round_times"]
    if limit is None:
        return
    means = {name: times[f"{name}_ms"]["average"] for name in ("draft", "verify", "host")}
    parts = [(name, mean) for name, mean in means.items() if mean > 0]
    figure = svg.share_bar(parts, limit["floor_per_step_ms"], "ms a step, mean")
    legend = _legend(*(f"{name}={name} {number(mean)} ms" for name, mean in parts))
    yield _section("Share of the hardware limit", [figure + legend], wide=True)
    if limit["is_exceeded"]:
        share = f"less: {EXCEEDED}"
    else:
        share = f"at {100 * limit['share_of_limit']:.0f} % of this limit"
    note = (
        f"A step of nothing but generation reads {number(limit['read_per_step_mb'])} MB of weights "
        f"and KV cache on average. At {number(limit['read_bandwidth_gb_s'])} GB/s "
        f"({limit['read_measurement']}) that takes {number(limit['floor_per_step_ms'])} ms; the "
        f"measured {number(limit['measured_per_step_ms'])} ms are {share}."
    )
    yield f'<p class="note">{escape(note)}</p>'


def _steps(recording: Recording, report: Mapping[str, Any]) -> Iterator[str]:
    classes = report["steps"]["step_size_histogram"]
    labels = [
        str(item["most"]) if item["least"] == item["most"] else f"{item['least']}–{item['most']}"
        for item in classes
    ]
    yield svg.bars(labels, [item["steps"] for item in classes], "tokens per step", "steps")
    steps = [step for step in recording.steps if step.iteration == 0]
    thin = steps[:: max(1, len(steps) // 400)]
    used = [(s.end_s, 100 * s.kv_used_blocks / s.kv_max_blocks) for s in thin]
    if len(used) > 1:
        yield svg.lines([("used", used)], "s since the first submission", "% of KV blocks in use")


def _sweep(sweep: Mapping[str, Any]) -> str:
    rows, every = sweep["rows"], [*sweep["rows"], *sweep["tree_rows"]]
    names = [str(row.get("tree", row["draft_len"])) for row in every]
    label = "draft length or tree" if sweep["tree_rows"] else "draft length"
    figures = []
    if len(rows) > 1:
        chart = svg.lines(
            [
                ("measured", [(row["draft_len"], row["decode_tok_s"]) for row in rows]),
                ("model", [(row["draft_len"], row["predicted_tok_s"]) for row in rows]),
            ],
            "draft length",
            "tok/s per user",
            whole=True,
        )
        figures.append(chart + _legend("first=measured", "second=cost model"))
    if sweep["tree_rows"]:
        speeds = [row["decode_tok_s"] for row in every]
        figures.append(svg.bars(names, speeds, label, "tok/s per user"))
    lengths = [row["acceptance_length"] for row in every]
    figures.append(svg.bars(names, lengths, label, "tokens per round"))
    return _section(f"Which {label}", figures)


def _facts(report: Mapping[str, Any]) -> str:
    """Every other figure, and what was run on what."""
    rows = [(label, f"{value} {unit}") for label, value, unit in figures(report)]
    for part in ("engine", "load"):
        rows += [
            (key.replace("_", " "), number(value) if isinstance(value, float) else str(value))
            for key, value in report[part].items()
            if value is not None
        ]
    cells = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
    return f'<section><h2>All figures</h2><table class="facts">{cells}</table></section>'


def _definitions() -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in DEFINITIONS.items()
    )
    return (
        "<section><h2>Definitions</h2><p>Percentile p of n sorted values is the element at index "
        f"int(n · p).</p><dl>{items}</dl></section>"
    )


def _legend(*items: str) -> str:
    """ "css=words", or words that are their own class."""
    pairs = ((css, words or css) for css, _, words in (item.partition("=") for item in items))
    keys = "".join(f'<span><i class="key {css}"></i>{escape(words)}</span>' for css, words in pairs)
    return f"<figcaption>{keys}</figcaption>"
