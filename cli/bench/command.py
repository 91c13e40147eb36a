"""`llmctl bench latency` and `throughput`: how fast an engine is, and what a draft changes.

Options are those of trtllm-bench where it has them. Results: a table on stderr, one JSON line on
stdout, files on request.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option

from llmctl.cli import engine_options as engine
from llmctl.cli.bench.options import COMMON
from llmctl.cli.run.drafting import parse_method
from llmctl.cli.signatures import give_parameters
from llmctl.errors import BadConfig

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure an engine: latency of one request at a time, or throughput of many.\n\n"
    "Examples:\n"
    "  llmctl bench latency --engine-dir out/target --draft-engine out/draft --baseline\n"
    "  llmctl bench throughput --engine-dir out/target --dataset dataset.jsonl --concurrency 8",
)


def _with_common_options(function: Callable[..., int]) -> Callable[..., int]:
    """Put the options of COMMON in the place of `**given`, for the parser."""
    signature = inspect.signature(function, eval_str=True)
    common = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in COMMON.items()
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
        Option("--model", help="A label for reports; warns where the engine is of another model."),
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
        raise BadConfig(f"--request-rate is {request_rate}; it must be above 0 and finite")
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
    from llmctl.cli.bench.comparison import compare
    from llmctl.cli.bench.driver import Pace
    from llmctl.cli.bench.load import LoadOptions
    from llmctl.cli.bench.publish import publish_results
    from llmctl.cli.bench.session import BenchOptions, Files, Session
    from llmctl.cli.bench.sweep import parse_sweep
    from llmctl.cli.bench.tree import counting
    from llmctl.cli.run.prompts import sampling_config
    from llmctl.runtime.open import EngineOptions
    from llmctl.runtime.ranks.serve import serve_rank

    compared = given["compare_drafting"]
    fixed = ("draft_len", "sweep_draft_len", "sweep_draft_tree", "tune_tree", "adaptive_draft_len")
    for name in (*fixed, "baseline", "synthetic_acceptance"):
        if compared is not None and given[name] not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise BadConfig(
                f"--compare-drafting compares methods as their engines were built, with plain "
                f"decoding; it goes without {option}",
                fix=f"leave {option} out, or measure one method with it: --draft-engine DIR, ...",
            )
    sweep = parse_sweep(given)
    if sweep.option and given["draft_len"] is not None:
        raise BadConfig(f"{sweep.option} and --draft-len are both given")
    if sweep.option and given["adaptive_draft_len"]:
        raise BadConfig(f"{sweep.option} measures fixed lengths, without --adaptive-draft-len")
    if sweep.option:  # the longest is what is checked
        method = parse_method(given, None, is_adaptive=False)
        method = method.with_draft_len(sweep.most_drafts)
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
            tp_size=given["tp_size"],
            rank_timeout_s=given["rank_timeout"],
            ranks_on_one_device=given["ranks_on_one_device"],
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
    if compared is not None:
        return compare(options, compared)
    code = serve_rank(options.engines)
    return publish_results(Session(options).measure()) if code is None else code
