"""`--compare-drafting`: methods of drafting over the same requests, one after the other.

Each entry has a target engine of its own where it says so, as heads are part of an engine. Without
drafts is measured first, on --engine-dir; every output is compared with that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from llmctl.builder.engine_format import EngineConfig
from llmctl.cli.bench.publish import exit_code
from llmctl.cli.bench.report import paired, report_json
from llmctl.cli.bench.session import BenchOptions, Measured, Session
from llmctl.cli.bench.sweep import measure_point
from llmctl.cli.bench.table import heading, make_console, number
from llmctl.cli.output_files import replacing, require_writable
from llmctl.cli.streams import json_line, results_on_stdout
from llmctl.errors import BadConfig, LlmctlError
from llmctl.runtime.drafting.method import Compared
from llmctl.runtime.drafting.methods import METHODS, choose_method, method_options
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, check_engines
from llmctl.runtime.ranks.launch import world_of

OPTION = "--compare-drafting"
PLAIN = "plain"
FORM = "entries NAME or NAME=DIR with commas between them"
_COLUMNS = (  # (key, head)
    ("tokens_per_round", "tokens a round"),
    ("round_ms", "round, ms"),
    ("token_ms", "token, ms"),
    ("decode_tok_s", "tok/s"),
    ("speedup", "times plain"),
    ("weight_mb", "weights, MB"),
    ("kv_kb_per_token", "KV, KB/token"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is measured once: its name as it was given, and which engines with which method."""

    name: str
    engines: EngineOptions
    has_window: bool = False  # see Compared


def parse_entries(text: str, engines: EngineOptions) -> list[Entry]:
    """Plain decoding on the engine, then the entries of the option in order. Raises BadConfig."""
    known = {compared.name: compared for row in METHODS for compared in row.compared}
    found = [Entry(PLAIN, replace(engines, method=PlainDecoding()))]
    for part in text.split(","):
        name, has_folder, folder = part.strip().partition("=")
        compared = known.get(name)
        if compared is None or (has_folder and not folder):
            raise BadConfig(
                f"{OPTION} has {part.strip()!r}; {FORM} are wanted",
                fix=f"the names are {', '.join(known)}",
            )
        entry = Entry(part.strip(), _engines(compared, folder, engines), compared.has_window)
        if entry.name in {other.name for other in found}:
            raise BadConfig(f"{OPTION} has {entry.name!r} twice")
        found.append(entry)
    return found


def _engines(compared: Compared, folder: str, engines: EngineOptions) -> EngineOptions:
    values: dict[str, Any] = {option.name: None for option in method_options()}
    values |= compared.values
    if compared.folder is not None:
        if not folder:
            raise BadConfig(
                f"{OPTION} has {compared.name!r} without an engine",
                fix=f"{compared.name}=DIR names the engine that drafts",
            )
        values[compared.folder] = Path(folder)
    elif folder:
        engines = replace(engines, engine_dir=Path(folder))
    return replace(engines, method=choose_method(values))


def compare(options: BenchOptions, text: str) -> int:
    """Measure and print; the exit code, as `publish_results` has it. All engines are checked before
    any is loaded. What raises later is raised when what was measured by then has been printed."""
    for name, is_asked in (
        ("drafts of one method", options.engines.method.is_drafting),
        ("--raw, --report and --trace", len(list(options.files)) > bool(options.files.report_json)),
    ):
        if is_asked:
            raise BadConfig(f"{OPTION} compares methods; it goes without {name}")
    entries = parse_entries(text, options.engines)
    require_writable(*options.files, source=options.load.dataset)
    for entry in entries:
        _check(entry)
    measured: dict[str, Measured] = {}
    looks_ahead = any(entry.has_window for entry in entries)  # then the others leave windows out
    code = 0
    with results_on_stdout(measured):
        try:
            for entry in entries:
                if not options.is_json:
                    print(f"== {entry.name}", file=sys.stderr, flush=True)
                load = replace(options.load, has_windows=entry.has_window or not looks_ahead)
                own = Session(replace(options, engines=entry.engines, load=load)).measure()
                measured[entry.name] = own
                if own.interrupt is not None:
                    break
                if own.failure is not None:
                    raise own.failure
        finally:
            if measured:
                missing = [entry.name for entry in entries if entry.name not in measured]
                code = _publish(options, measured, missing)
    return code


def _check(entry: Entry) -> None:
    """Raises what is wrong with the engines of an entry, and names the entry."""
    try:
        _require_no_job(check_engines(entry.engines, reads_ahead=False).target)
    except LlmctlError as error:
        if entry.name != PLAIN:
            error.args = (f"{OPTION} {entry.name}: {error}",)
        error.fix = error.general_fix
        raise


def _require_no_job(target: EngineConfig) -> None:
    """Raises BadConfig where a launcher has started the ranks of an engine: they end with it."""
    world = world_of(target)
    if world is not None:
        raise BadConfig(
            f"{OPTION} opens engines one after the other, and the {world.size} processes that "
            f"{world.launcher} started are the ranks of one",
            fix=f"run it without {world.launcher}: the ranks of each engine are then started for "
            "it",
        )


def _publish(
    options: BenchOptions, measured: Mapping[str, Measured], missing: Sequence[str]
) -> int:
    """Write and print; the exit code of what was measured. missing: entries that were not."""
    reports = {name: report_json(own) for name, own in measured.items()}
    plain = measured[PLAIN]
    rows = [_row(name, own, plain, reports[name]) for name, own in measured.items()]
    done = [row for row in rows if row["decode_tok_s"] is not None]
    fastest = max(done, key=lambda row: row["decode_tok_s"])["name"] if done else None
    report = reports[PLAIN] | {
        "is_partial": bool(missing) or any(own.is_partial for own in measured.values()),
        "comparison": {"rows": rows, "fastest": fastest, "not_measured": list(missing)},
    }
    line = json_line(report)
    try:
        if options.files.report_json is not None:
            with replacing(options.files.report_json, "w") as file:
                file.write(line + "\n")
    finally:
        if not options.is_json:
            console = make_console()
            console.print(heading(report), highlight=False)
            console.print(_table(rows, fastest))
            if missing:
                console.print(f"PARTIAL: not measured: {', '.join(missing)}", highlight=False)
        print(line, flush=True)
    return max(
        exit_code(own, reports[name]["request_info"]["num_failed"])
        for name, own in measured.items()
    )


def _row(
    name: str, measured: Measured, plain: Measured, report: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of one entry. A speed-up above 1 is faster than plain decoding."""
    engine, recording = report["engine"], measured.ways[0].recording
    point = measure_point(engine["draft_len"], recording)
    pairs = paired(recording, plain.ways[0].recording)
    return {
        "name": name,
        "engine_dir": engine["engine_dir"],
        "draft_method": engine["draft_method"],
        "draft_len": engine["draft_len"],
        "tokens_per_round": point.acceptance_length if point else None,
        "round_ms": point.round_ms if point else None,
        "token_ms": 1e3 / point.decode_tok_s if point else None,
        "decode_tok_s": point.decode_tok_s if point else None,
        "speedup": pairs["total_time_ratio"] if pairs else None,
        "num_pairs": pairs["num_pairs"] if pairs else 0,
        "num_same_outputs": pairs["num_same_outputs"] if pairs else 0,
        "weight_mb": engine["all_weight_mb"],
        "kv_kb_per_token": engine["kv_kb_per_token"],
    }


def _table(rows: Sequence[Mapping[str, Any]], fastest: str | None) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")  # apart from the name: before a folded path it would stand on a line alone
    table.add_column("method", overflow="fold")
    for _, head in (*_COLUMNS, ("", "same text")):
        table.add_column(head, justify="right")
    names = Counter(row["name"].partition("=")[0] for row in rows)
    for row in rows:
        is_fastest = row["name"] == fastest
        method, _, folder = row["name"].partition("=")
        if names[method] > 1:  # which of them: a whole path would be folded
            method = f"{method}={Path(folder).name}"
        cells = (number(row[key]) for key, _ in _COLUMNS)
        same = f"{row['num_same_outputs']} of {row['num_pairs']}"
        mark = ">" if is_fastest else ""
        table.add_row(mark, method, *cells, same, style="bold" if is_fastest else None)
    return table
