"""The report as text on stderr. Every figure has its unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from llmctl.cli.bench.hardware import EXCEEDED
from llmctl.cli.bench.sweep import ENOUGH_ROUNDS
from llmctl.cli.bench.tree import tree_line

MANY, MANY_TOKENS = 64, 8192  # requests in flight, for whom steps of so many tokens are faster
WIDTH = 110  # columns where there is no terminal
COLUMNS = ("p50", "p90", "p95", "p99", "minimum", "maximum", "average")
NARROW = 105  # columns below which rows get their short names
SHORT_NAMES = {
    "time to first token (TTFT)": "TTFT",
    "inter-token latency (ITL)": "ITL",
    "time per output token (TPOT)": "TPOT",
    "generation speed of a request": "generation",
}
SPREADS = (  # (section, key, label, unit)
    ("streaming_metrics", "ttft_ms", "time to first token (TTFT)", "ms"),
    ("streaming_metrics", "itl_ms", "inter-token latency (ITL)", "ms"),
    ("streaming_metrics", "tpot_ms", "time per output token (TPOT)", "ms"),
    ("streaming_metrics", "e2e_ms", "end to end", "ms"),
    ("streaming_metrics", "gen_tok_s", "generation speed of a request", "tok/s"),
    ("round_times", "draft_ms", "draft, a step", "ms"),
    ("round_times", "verify_ms", "verify, a step", "ms"),
    ("round_times", "host_ms", "host, a step", "ms"),
    ("steps", "step_tokens", "step size", "tokens"),
)
RATES = (  # (key of "performance", label, unit)
    ("request_throughput_req_s", "requests finished", "req/s"),
    ("system_output_throughput_tok_s", "output, system", "tok/s"),
    ("output_throughput_per_user_tok_s", "output, per user", "tok/s"),
    ("output_throughput_per_gpu_tok_s", "output, per GPU", "tok/s"),
    ("system_total_throughput_tok_s", "input and output, system", "tok/s"),
    ("total_latency_ms", "total time", "ms"),
    ("avg_concurrent_requests", "requests in flight, mean", "requests"),
    ("issue_rate_req_s", "requests submitted", "req/s"),
)


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Tables and notes of one report."""
    for line in banner(report):
        console.print(line, style="bold red", highlight=False)
    console.print(heading(report), highlight=False)
    console.print(_figures(report))
    console.print(_spreads(report, is_narrow=console.width < NARROW))
    if report.get("sweep") is not None:
        console.print(_sweep(report["sweep"]))
    for line in notes(report):
        console.print(line, highlight=False)


def make_console() -> Console:
    """On stderr, as wide as the terminal or wide enough for the tables."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=WIDTH)


def banner(report: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about what limits the meaning of the figures."""
    info = report["request_info"]
    synthetic = report["synthetic_acceptance"]
    if synthetic is not None:
        given = synthetic["acceptance_length"] or synthetic["acceptance_rates"]
        yield f"{synthetic['note']} ({given})"
    if report["is_partial"]:
        yield f"PARTIAL: interrupted; {info['num_finished']} requests had finished"
    if info["num_failed"]:
        yield f"{info['num_failed']} of {info['num_requests']} requests FAILED"
        for reason, count in info["failures"].items():
            yield f"{count} of them with {reason}"


def heading(report: Mapping[str, Any]) -> str:
    """What was measured, on what."""
    engine, load, info = report["engine"], report["load"], report["request_info"]
    draft = f", {engine['draft_method']} of {engine['draft_len']}" if engine["draft_len"] else ""
    ranks = ""
    if engine["num_ranks"] > 1:
        ranks = f", {engine['num_ranks']} ranks"
        own = engine["draft_num_ranks"]
        draft += f" on {own} rank{'s' if own > 1 else ''}" if draft and own is not None else ""
    pace, in_flight = load["request_rate_req_s"], load["concurrency"] or "all"
    sent = f"{in_flight} in flight"
    if pace is not None:  # then few may be in flight, or all
        at_most = f", at most {load['concurrency']} in flight" if load["concurrency"] else ""
        sent = f"{pace:g} requests/s sent{at_most}"
    return (
        f"{report['command']}: {engine['model']} on {engine['device']} "
        f"({engine['backend']}{ranks}{draft}); "
        f"{info['num_finished']} of {info['num_requests']} requests finished, "
        f"{sent}, {info['num_iterations']} "
        f"iteration{'' if info['num_iterations'] == 1 else 's'}"
    )


def number(value: float | None) -> str:
    """About four digits; a dash for what was not measured."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def figures(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(label, value, unit) of the figures that have no spread."""
    info, performance = report["request_info"], report["performance"]
    yield "input a request, mean", number(info["avg_input_length_tokens"]), "tokens"
    yield "output a request, mean", number(info["avg_output_length_tokens"]), "tokens"
    is_paced = report["load"]["request_rate_req_s"] is not None
    for key, label, unit in RATES:
        if performance.get(key) is not None and (is_paced or key != "issue_rate_req_s"):
            yield label, number(performance[key]), unit
    decoding = report["decoding_stats"]
    if decoding is not None:
        yield "acceptance length", number(decoding["acceptance_length"]), "tokens/round"
        yield "acceptance rate", number(100 * decoding["acceptance_rate"]), "% of drafts"
        shares = " ".join(f"{100 * share:.0f}" for share in decoding["acceptance_at_position"])
        yield "kept at position 1, 2, ...", shares, "% of rounds"
    cache = report["kv_cache"]
    if cache is not None:
        yield "KV cache used, peak", number(100 * cache["peak_used_share"]), "% of blocks"
        yield "KV cache used, mean", number(100 * cache["mean_used_share"]), "% of blocks"
    limit = report["hardware_limit"]
    if limit is not None:
        yield "memory-read limit", number(limit["floor_per_step_ms"]), "ms/step"
        if limit["is_exceeded"]:
            yield "share of that limit", "none", EXCEEDED
        else:
            yield "share of that limit", number(100 * limit["share_of_limit"]), "%"


def notes(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines below the tables."""
    baseline = report.get("baseline")
    if baseline is not None and baseline["speedup"] is not None:
        speedup = baseline["speedup"]
        ratio = speedup["request_e2e_ratio"]
        without = baseline["performance"]["system_output_throughput_tok_s"]
        same = (
            f"{speedup['num_same_outputs']} of {speedup['num_pairs']} outputs are the same tokens"
        )
        if report["synthetic_acceptance"] is not None:
            same = "outputs were not compared"
        yield (
            f"with drafts {speedup['total_time_ratio']:.2f} x as fast as without "
            f"({number(without)} tok/s); request by request {ratio['median']:.2f} x, "
            f"{ratio['minimum']:.2f} to {ratio['maximum']:.2f}; {same}"
        )
    if report.get("sweep") is not None:
        yield advice(report["sweep"])
    if "tree" in report:
        yield tree_line(report["tree"])
    captured = report["graphs_captured_in_load"]
    if captured:
        yield (
            f"{captured} CUDA graphs were captured while requests ran, each a pause of tens of "
            "milliseconds; a longer --warmup of the same requests captures more of them before"
        )
    more = more_at_once(report)
    if more is not None:
        yield more
    if report["load"]["kv_cache_block_reuse"]:
        yield "prompts seen before came from the KV cache (block reuse is on)"


def more_at_once(report: Mapping[str, Any]) -> str | None:
    """What to build, where requests waited for the engine's limit and not for memory."""
    load, engine, cache = report["load"], report["engine"], report["kv_cache"]
    limit = engine["max_batch_size"]
    wanted = min(load["concurrency"] or load["num_requests"], load["num_requests"])
    is_chosen = load["request_rate_req_s"] is not None or load["max_batch_size"] is not None
    if is_chosen or wanted <= limit or cache is None:
        return None
    room = int(limit / max(cache["peak_used_share"], limit / wanted))  # of as many as there were
    step = 1 << max(room.bit_length() - 3, 0)  # three digits of a binary number are enough
    if room // step * step <= limit:
        return None
    is_short = room >= MANY and engine["max_num_tokens"] < MANY_TOKENS
    tokens = f" --max-num-tokens {MANY_TOKENS}" if is_short else ""
    which = "" if engine["draft_engine_dir"] is None else ", the draft engine too,"
    return (
        f"{wanted} requests were to run at once, and the engine takes {limit}, which held "
        f"{cache['peak_used_share']:.0%} of the KV cache. Built{which} with --max-batch-size "
        f"{room // step * step}{tokens} it would run more of them together"
    )


def advice(sweep: Mapping[str, Any]) -> str:
    """The answer to "which draft length, or which tree?", and whether another run would give it."""
    few = sweep["fewest_rounds"]
    doubt = f"; {few} rounds are too few to be sure (use longer outputs or more requests)"
    return f"{_advised(sweep)}{doubt if few < ENOUGH_ROUNDS else ''}"


def _advised(sweep: Mapping[str, Any]) -> str:
    speeds = {row["draft_len"]: row["decode_tok_s"] for row in sweep["rows"]}
    tree, plain = sweep["recommended_draft_tree"], speeds.get(0)
    if tree is not None:
        option, speed = f"--draft-tree {tree}", _tree_speeds(sweep)[tree]
    elif sweep["recommended_draft_len"] == 0:
        return f"recommended: no drafts; no draft {_kinds(sweep)} is faster"
    else:
        option = f"--draft-len {sweep['recommended_draft_len']}"
        speed = speeds[sweep["recommended_draft_len"]]
    compared = f", {speed / plain:.2f} x without drafts" if plain else ""
    others = [value for length, value in speeds.items() if length]
    if tree is not None and others:
        compared += f", {speed / max(others):.2f} x the fastest length"
    elif sweep["tree_rows"]:
        compared += f", {speed / max(_tree_speeds(sweep).values()):.2f} x the fastest tree"
    said = f"recommended: {option} ({number(speed)} tok/s per user{compared})"
    if "model_recommends_draft_len" not in sweep:
        return said
    return f"{said}; the cost model says {sweep['model_recommends_draft_len']}"


def _tree_speeds(sweep: Mapping[str, Any]) -> dict[str, float]:
    return {row["tree"]: row["decode_tok_s"] for row in sweep["tree_rows"]}


def _kinds(sweep: Mapping[str, Any]) -> str:
    kinds = ["length"] * (len(sweep["rows"]) > 1) + ["tree"] * bool(sweep["tree_rows"])
    return " or ".join(kinds)


def _sweep(sweep: Mapping[str, Any]) -> Table:
    ends = " and ".join(map(str, sweep.get("calibrated_on_draft_lens", ())))
    caption = f"the cost model knows lengths {ends} only" if ends else None
    table = Table(box=None, pad_edge=False, caption=caption)
    heads = (
        "draft length or tree" if sweep["tree_rows"] else "draft length",
        "speed, tok/s",
        "model, tok/s",
        "off by, %",
        "tokens per round",
    )
    for head in (*heads, "round, ms", "draft, ms", "verify, ms"):
        table.add_column(head, justify="right")
    tree, length = sweep["recommended_draft_tree"], sweep["recommended_draft_len"]
    for row in (*sweep["rows"], *sweep["tree_rows"]):
        is_chosen = (row.get("tree"), row["draft_len"]) == (tree, length)
        is_told = "predicted_tok_s" in row
        cells = (
            f"{'> ' if is_chosen else ''}{row.get('tree', row['draft_len'])}",
            number(row["decode_tok_s"]),
            number(row["predicted_tok_s"]) if is_told else "",
            f"{100 * row['prediction_error_share']:+.1f}" if is_told else "",
            *(number(row[k]) for k in ("acceptance_length", "round_ms", "draft_ms", "verify_ms")),
        )
        table.add_row(*cells, style="bold" if is_chosen else None)
    return table


def _figures(report: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for row in figures(report):
        table.add_row(*row)
    return table


def _spreads(report: Mapping[str, Any], *, is_narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("unit")
    for name in COLUMNS:
        table.add_column(name.replace("imum", "").replace("average", "mean"), justify="right")
    for label, unit, spread in spreads(report):
        name = SHORT_NAMES.get(label, label) if is_narrow else label
        table.add_row(name, unit, *(number(spread[name]) for name in COLUMNS))
    return table


def spreads(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """(label, unit, percentiles) of everything that has them."""
    for section, key, label, unit in SPREADS:
        spread = report[section][key]
        is_idle = key == "draft_ms" and report["decoding_stats"] is None
        if spread is not None and not is_idle:
            yield label, unit, spread
