"""The options of both benchmarks, for the parser."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from llmctl.cli import engine_options as engine
from llmctl.cli.dataset.command import MOST_REQUESTS
from llmctl.cli.output_files import JSON_LINES, ending
from llmctl.cli.run import options as option
from llmctl.cli.run.drafting import parameters
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy

Dataset = Annotated[
    Path | None, Option("--dataset", help="Requests by `llmctl dataset`; default: random prompts.")
]
NumRequests = Annotated[
    int,
    Option(
        "--num-requests",
        min=0,
        max=MOST_REQUESTS,
        help="Rows; 0: all, or 10 random.",
    ),
]
TargetInputLen = Annotated[
    int | None, Option("--target-input-len", min=1, help="Length of random prompts; default 128.")
]
TargetOutputLen = Annotated[
    int | None,
    Option("--target-output-len", min=1, help="Output tokens where rows say none; default 128."),
]
Warmup = Annotated[
    int,
    Option("--warmup", min=0, max=MOST_REQUESTS, help="Requests run before measuring."),
]
Iterations = Annotated[int, Option("--iterations", min=1, help="Measured runs of the whole load.")]
Baseline = Annotated[
    bool, Option("--baseline", help="Run the load without drafts too; print the paired ratio.")
]
SweepDraftLen = Annotated[
    str | None,
    Option("--sweep-draft-len", help='"1..16" or "1,2,4": speed by draft length; recommends one.'),
]
SweepDraftTree = Annotated[
    str | None,
    Option(
        "--sweep-draft-tree",
        help='"4,2,8;5,3,16": speed by tree of a draft engine, as --draft-tree has them.',
        hidden=True,
    ),
]
CompareDrafting = Annotated[
    str | None,
    Option(
        "--compare-drafting",
        help='"draft=DIR,ngram,eagle=DIR": a table of methods over the same requests.',
    ),
]
SyntheticAcceptanceOption = Annotated[
    str | None,
    Option(
        "--synthetic-acceptance",
        help="Accept drafts at random: mean tokens per round, or rates by position, as in vLLM.",
    ),
]
TuneTree = Annotated[
    int | None,
    Option("--tune-tree", min=1, hidden=True, help="Medusa: the best tree of N drafts, by counts."),
]
EosId = Annotated[
    int,
    Option("--eos-id", min=-1, help="Token that ends an output; -1: full length.", hidden=True),
]
FreeMemoryFraction = Annotated[
    float | None,
    Option(
        "--kv-cache-free-gpu-mem-fraction",
        "--kv-cache-free-gpu-memory-fraction",
        help="Fraction of the free memory for both KV caches; default 0.9 on a GPU, 0.5 of RAM.",
        hidden=True,
    ),
]
EnableBlockReuse = Annotated[
    bool,
    Option(
        "--kv-cache-enable-block-reuse/--no-kv-cache-enable-block-reuse",
        help="Reuse the KV cache for prompts that were computed before.",
        hidden=True,
    ),
]
Report = Annotated[
    Path | None,
    Option(
        "--report",
        callback=ending(".html", ".htm"),
        help="Self-contained HTML page of tables and charts.",
    ),
]
Trace = Annotated[
    Path | None,
    Option("--trace", callback=ending(".json"), help="Trace for ui.perfetto.dev, JSON."),
]
Raw = Annotated[
    Path | None,
    Option(
        "--raw",
        callback=ending(*JSON_LINES),
        help="Every request and step, a JSON line each.",
    ),
]
ReportJson = Annotated[
    Path | None,
    Option(
        "--report-json",
        callback=ending(".json", ".jsonl"),
        help="The JSON line of stdout, in a file.",
        hidden=True,
    ),
]
Json = Annotated[bool, Option("--json", help="Only the JSON line: no tables, no progress.")]


# The options of both commands: name -> (what it is, default); without one it is required.
_REQUIRED = inspect.Parameter.empty
COMMON: dict[str, tuple[Any, Any]] = {
    "engine_dir": (option.EngineDir, _REQUIRED),
    **{name: (annotation, None) for name, annotation in parameters().items()},
    "draft_len": (option.DraftLen, None),
    "adaptive_draft_len": (option.AdaptiveDraftLen, False),
    "baseline": (Baseline, False),
    "sweep_draft_len": (SweepDraftLen, None),
    "sweep_draft_tree": (SweepDraftTree, None),
    "compare_drafting": (CompareDrafting, None),
    "synthetic_acceptance": (SyntheticAcceptanceOption, None),
    "tune_tree": (TuneTree, None),
    "dataset": (Dataset, None),
    "num_requests": (NumRequests, 0),
    "target_input_len": (TargetInputLen, None),
    "target_output_len": (TargetOutputLen, None),
    "warmup": (Warmup, 2),
    "iterations": (Iterations, 1),
    "temperature": (option.Temperature, None),
    "top_k": (option.TopK, None),
    "top_p": (option.TopP, None),
    "min_p": (option.MinP, None),
    "random_seed": (option.RandomSeed, 0),
    "eos_id": (EosId, -1),
    "kv_cache_free_gpu_mem_fraction": (FreeMemoryFraction, None),
    "kv_cache_enable_block_reuse": (EnableBlockReuse, False),
    "enable_chunked_context": (engine.EnableChunkedContext, True),
    "scheduler_policy": (engine.SchedulerPolicy, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
    "max_batch_size": (engine.MaxBatchSize, None),
    "max_num_tokens": (engine.MaxNumTokens, None),
    "max_step_ms": (engine.MaxStepMs, None),
    "num_threads": (option.NumThreads, None),
    "tp_size": (engine.TpSize, None),
    "rank_timeout": (engine.RankTimeout, None),
    "ranks_on_one_device": (engine.RanksOnOneDevice, False),
    "trusted_builder": (engine.TrustedBuilder, None),
    "report": (Report, None),
    "trace": (Trace, None),
    "raw": (Raw, None),
    "report_json": (ReportJson, None),
    "as_json": (Json, False),
}
