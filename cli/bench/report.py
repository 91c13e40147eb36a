"""Makes the JSON object that a benchmark prints from its recordings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from llmctl.cli.bench.hardware import limit_json
from llmctl.cli.bench.metrics import compute, e2e_ms
from llmctl.cli.bench.records import Recording
from llmctl.cli.bench.session import BenchOptions, Measured, Way
from llmctl.cli.bench.sweep import measure_point, sweep_json
from llmctl.cli.bench.tree import tree_json

SCHEMA_VERSION = 1


def report_json(measured: Measured) -> dict[str, Any]:
    """Every figure; at the top level those of the main way, in a sweep of what is
    recommended."""
    options = measured.options
    sweep = None
    main = measured.ways[0]
    if options.sweep.option:
        ways = measured.ways
        points = [measure_point(way.draft_len, way.recording, way.tree) for way in ways]
        sweep = sweep_json([point for point in points if point is not None])
        if sweep is not None:
            chosen = sweep["recommended_draft_len"], sweep["recommended_draft_tree"]
            main = next(way for way in ways if (way.draft_len, way.tree) == chosen)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": options.command,
        "is_partial": measured.is_partial,
        "synthetic_acceptance": measured.forced.to_json() if measured.forced is not None else None,
        "engine": measured.engine_facts | _way_json(main),
        "load": _load_json(options, len(measured.requests)),
        **_figures(measured, main),
    }
    if options.has_baseline:
        plain = measured.ways[1]
        report["baseline"] = {
            **_figures(measured, plain),
            "speedup": paired(main.recording, plain.recording),
        }
    if options.sweep.option:
        report["sweep"] = sweep
    if options.tune_tree is not None:
        report["tree"] = tree_json(options.engines.method, options.tune_tree)
    return report


def main_way(measured: Measured, report: Mapping[str, Any]) -> Way:
    """The way whose figures are at the top of the report."""
    return next(way for way in measured.ways if _way_json(way).items() <= report["engine"].items())


def _way_json(way: Way) -> dict[str, Any]:
    return {"draft_len": way.draft_len} | ({} if way.tree is None else {"draft_tree": way.tree})


def _figures(measured: Measured, way: Way) -> dict[str, Any]:
    return {
        **compute(way.recording, measured.checked.num_gpus),
        "graphs_captured_in_load": way.recording.num_graphs_captured,
        "hardware_limit": limit_json(measured.reads, measured.read_rate, way.recording.steps),
    }


def _load_json(options: BenchOptions, num_requests: int) -> dict[str, Any]:
    load, sampling = options.load, options.load.sampling
    return {
        "dataset": str(load.dataset) if load.dataset else None,
        "num_requests": num_requests,
        "warmup_requests": options.warmup,
        "iterations": options.iterations,
        "concurrency": options.pace.concurrency,
        "request_rate_req_s": options.pace.request_rate,
        "eos_id": load.eos_id,
        "is_greedy": sampling.is_greedy,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "random_seed": sampling.seed,
        "kv_cache_block_reuse": options.engines.enable_block_reuse,
        "chunked_context": options.engines.enable_chunked_context,
        "adaptive_draft_len": options.engines.adaptive_draft_len,
        "scheduler_policy": options.engines.scheduler_policy.value,
        "max_batch_size": options.engines.max_batch_size,
        "max_num_tokens": options.engines.max_num_tokens,
        "max_step_ms": options.engines.max_step_ms,
        "num_threads": options.engines.num_threads,
    }


def paired(drafted: Recording, plain: Recording) -> dict[str, Any] | None:
    """How much faster the same requests end with drafts: ratios of each request's end-to-end time
    and of each iteration's total, and how many outputs are the same tokens. None without a pair."""
    others = {(item.iteration, item.index): item for item in plain.done}
    pairs = [
        (item, others[item.iteration, item.index])
        for item in drafted.done
        if (item.iteration, item.index) in others
    ]
    if not pairs:
        return None
    ratios = sorted(e2e_ms(b) / e2e_ms(a) for a, b in pairs)
    totals = []
    for number in sorted({a.iteration for a, _ in pairs}):
        ends = [
            tuple(max(x.arrivals[-1].at_s for x in side) for side in zip(*group, strict=True))
            for group in [[pair for pair in pairs if pair[0].iteration == number]]
        ]
        totals += [b / a for a, b in ends]
    return {
        "num_pairs": len(pairs),
        "total_time_ratio": median(totals),
        "total_time_ratios": totals,
        "request_e2e_ratio": {
            "median": median(ratios),
            "minimum": ratios[0],
            "maximum": ratios[-1],
        },
        "num_same_outputs": sum(a.output_ids == b.output_ids for a, b in pairs),
    }


def raw_lines(measured: Measured) -> Iterator[str]:
    """Every request and step of every way, a JSON object a line."""
    for way in measured.ways:
        mark = {
            **_way_json(way),
            "is_synthetic_acceptance": measured.forced is not None and way.draft_len > 0,
        }
        records = [item.to_json() for item in way.recording.requests]
        records += [item.to_json() for item in way.recording.steps]
        yield from (json.dumps(mark | record, allow_nan=False) for record in records)
