"""`llmctl bench latency` and `throughput`: how fast an engine is, and what a draft changes.

Options are those of trtllm-bench where it has them. Results: a table on stderr, one JSON line on
stdout, files on request.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from llmctl.cli import engine_options as engine
from llmctl.cli.run import options as option
from llmctl.cli.run.drafting import parameters, parse_method
from llmctl.cli.signatures import give_parameters
from llmctl.errors import BadConfig
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure an engine: latency of one request at a time, or throughput of many.\n\n"
    "Examples:\n"
    "  llmctl bench latency --engine-dir out/target --draft-engine out/draft --baseline\n"
    "  llmctl bench throughput --engine-dir out/target --dataset dataset.jsonl --concurrency 8",
)

Dataset = Annotated[
    Path | None, Option("--dataset", help="Requests by `llmctl dataset`; default: random prompts.")
]
NumRequests = Annotated[
    int, Option("--num-requests", min=0, help="Rows to use; 0: all, or 10 random prompts.")
]
TargetInputLen = Annotated[
    int | None, Option("--target-input-len", min=1, help="Length of random prompts; default 128.")
]
TargetOutputLen = Annotated[
    int | None,
    Option("--target-output-len", min=1, help="Output tokens where rows say none; default 128."),
]
Warmup = Annotated[int, Option("--warmup", min=0, help="Requests run before measuring.")]
Iterations = Annotated[int, Option("--iterations", min=1, help="Measured runs of the whole load.")]
Baseline = Annotated[
    bool, Option("--baseline", help="Run the load without drafts too; print the paired ratio.")
]
SweepDraftLen = Annotated[
    str | None,
    Option("--sweep-draft-len", help='"1..16" or "1,2,4": speed by draft length; recommends one.'),
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
    Path | None, Option("--report", help="Self-contained HTML page of tables and charts.")
]
Trace = Annotated[Path | None, Option("--trace", help="Trace for ui.perfetto.dev, JSON.")]
Raw = Annotated[Path | None, Option("--raw", help="Every request and step, a JSON line each.")]
ReportJson = Annotated[
    Path | None, Option("--report-json", help="The JSON line of stdout, in a file.", hidden=True)
]
Json = Annotated[bool, Option("--json", help="Only the JSON line: no tables, no progress.")]


# The options of both commands: name -> (what it is, default); without one it is required.
_REQUIRED = inspect.Parameter.empty
_COMMON: dict[str, tuple[Any, Any]] = {
    "engine_dir": (option.EngineDir, _REQUIRED),
    **{name: (annotation, None) for name, annotation in parameters().items()},
    "draft_len": (option.DraftLen, None),
    "adaptive_draft_len": (option.AdaptiveDraftLen, False),
    "baseline": (Baseline, False),
    "sweep_draft_len": (SweepDraftLen, None),
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
    "trusted_builder": (engine.TrustedBuilder, None),
    "report": (Report, None),
    "trace": (Trace, None),
    "raw": (Raw, None),
    "report_json": (ReportJson, None),
    "as_json": (Json, False),
}


def _with_common_options(function: Callable[..., int]) -> Callable[..., int]:
    """Put the options of _COMMON in the place of `**given`, for the parser."""
    signature = inspect.signature(function, eval_str=True)
    common = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in _COMMON.items()
    ]
    parameters = [*list(signature.parameters.values())[:-1], *common]

    def command(**values: Any) -> int:
        return function(**values)

    give_parameters(command, function, signature, parameters)
    return command


@bench.callback()
def common(
    context: typer.Context,
    model: Annotated[
        str | None,
        Option("--model", help="A label; one that the engine's origin is not, is remarked."),
    ] = None,
) -> None:
    context.obj = model


@bench.command("latency", short_help="One request at a time.")
@_with_common_options
def latency(
    context: typer.Context,
    *,
    concurrency: Annotated[
        int, Option("--concurrency", min=1, help="Requests in flight.", hidden=True)
    ] = 1,
    **given: Any,
) -> int:
    """Measure requests one at a time, with or without drafts.

    The table goes to stderr, one JSON line to stdout. Exit code 130 after Ctrl-C, with a report of
    what had finished.

    Examples:
      llmctl bench latency --engine-dir out/target --draft-engine out/draft --baseline
      llmctl bench latency --engine-dir out/target --target-input-len 64 --iterations 5
    """
    return _run("latency", context.obj, concurrency, None, given)


@bench.command("throughput", short_help="Many requests at once.")
@_with_common_options
def throughput(
    context: typer.Context,
    *,
    concurrency: Annotated[
        int, Option("--concurrency", min=-1, help="Most requests in flight; -1: all at once.")
    ] = -1,
    request_rate: Annotated[
        float | None,
        Option("--request-rate", help="Requests a second, Poisson arrivals; default: no waiting."),
    ] = None,
    streaming: Annotated[
        bool, Option("--streaming", help="Always on: first tokens are timed.", hidden=True)
    ] = True,
    **given: Any,
) -> int:
    """Measure many requests at once: all in flight, a bounded number, or Poisson arrivals.

    The table goes to stderr, one JSON line to stdout. Exit code 130 after Ctrl-C, with a report of
    what had finished.

    Examples:
      llmctl bench throughput --engine-dir out/target --num-requests 100
      llmctl bench throughput --engine-dir out/target --dataset dataset.jsonl --request-rate 20
    """
    if concurrency == 0:
        raise BadConfig("--concurrency is 0; it must be at least 1, or -1 for all at once")
    if request_rate is not None and not 0 < request_rate < math.inf:
        raise BadConfig(f"--request-rate is {request_rate}; it must be above 0")
    bound = None if concurrency == -1 else concurrency
    return _run("throughput", context.obj, bound, request_rate, given)


def _run(
    command: str,
    label: str | None,
    concurrency: int | None,
    request_rate: float | None,
    given: dict[str, Any],
) -> int:
    """From options to exit code; heavy imports happen here."""
    from llmctl.cli.bench.driver import Pace
    from llmctl.cli.bench.load import LoadOptions
    from llmctl.cli.bench.publish import publish_results
    from llmctl.cli.bench.session import BenchOptions, Files, Session
    from llmctl.cli.bench.sweep import parse_sweep
    from llmctl.cli.bench.tree import counting
    from llmctl.cli.run.prompts import sampling_config
    from llmctl.runtime.open import EngineOptions
    from llmctl.runtime.ranks.serve import serve_rank

    sweep = parse_sweep(given["sweep_draft_len"]) if given["sweep_draft_len"] is not None else ()
    if sweep and given["draft_len"] is not None:
        raise BadConfig("--sweep-draft-len and --draft-len are both given")
    if sweep and given["adaptive_draft_len"]:
        raise BadConfig("--sweep-draft-len measures fixed lengths, without --adaptive-draft-len")
    if sweep:  # the longest is what is checked
        method = parse_method(given, None, is_adaptive=False)
        method = method.with_draft_len(max(sweep))
    else:
        is_adaptive = given["adaptive_draft_len"]
        method = parse_method(given, given["draft_len"], is_adaptive=is_adaptive)
    if given["tune_tree"] is not None:
        method = counting(method)
    seed = given["random_seed"]
    options = BenchOptions(
        command=command,
        engines=EngineOptions(
            engine_dir=given["engine_dir"],
            method=method,
            free_fraction=given["kv_cache_free_gpu_mem_fraction"],
            enable_block_reuse=given["kv_cache_enable_block_reuse"],
            enable_chunked_context=given["enable_chunked_context"],
            adaptive_draft_len=given["adaptive_draft_len"],
            scheduler_policy=given["scheduler_policy"],
            max_batch_size=given["max_batch_size"],
            max_num_tokens=given["max_num_tokens"],
            max_step_ms=engine.step_target(given["max_step_ms"]),
            num_threads=given["num_threads"],
            trusted_builder=given["trusted_builder"],
        ),
        load=LoadOptions(
            dataset=given["dataset"],
            num_requests=given["num_requests"],
            input_len=given["target_input_len"],
            output_len=given["target_output_len"],
            eos_id=given["eos_id"],
            sampling=sampling_config(
                temperature=given["temperature"],
                top_k=given["top_k"],
                top_p=given["top_p"],
                min_p=given["min_p"],
                seed=seed,
            ),
        ),
        pace=Pace(concurrency, request_rate, seed),
        warmup=given["warmup"],
        iterations=given["iterations"],
        has_baseline=given["baseline"],
        sweep=sweep,
        synthetic_acceptance=given["synthetic_acceptance"],
        tune_tree=given["tune_tree"],
        files=Files(given["raw"], given["report"], given["report_json"], given["trace"]),
        is_json=given["as_json"],
        label=label,
    )
    code = serve_rank(options.engines)
    return publish_results(Session(options).measure()) if code is None else code
