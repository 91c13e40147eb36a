"""`llmctl build`: checkpoint -> engine directory.

Options are those of trtllm-build. The plugin options come from the table in
`builder/plugin_config.py`: each has its effect in the help, and a value that cannot be honoured is
refused with the reason. Heavy imports happen inside the command, so `--help` stays fast.
"""

from __future__ import annotations

import inspect
import json
import logging
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.builder.plugin_config import OPTIONS
from llmctl.errors import BadConfig

if TYPE_CHECKING:
    from llmctl.builder.build import EnginePlan
    from llmctl.builder.generated import LoadFormat

LOG_LEVELS = {  # trtllm-build's names -> Python's levels
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
_LIMITS = (  # options that are fields of BuildRequest
    "dtype",
    "max_batch_size",
    "max_seq_len",
    "max_input_len",
    "max_num_tokens",
    "max_beam_width",
    "max_draft_len",
    "speculative_decoding_mode",
    "tokens_per_block",
    "kv_cache_type",
    "kv_cache_dtype",
    "logits_dtype",
    "gather_context_logits",
)


def _build(
    checkpoint_dir: Annotated[
        Path,
        typer.Option(
            "--checkpoint-dir",
            help="Hugging Face folder: BF16, FP16, FP32, or FP8 of ModelOpt or compressed-tensors.",
        ),
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Engine directory to create.")
    ] = Path("engine_outputs"),
    backend: Annotated[
        str,
        typer.Option(
            "--backend", help="What runs the engine: cpu, cuda, or auto (cuda where a GPU is)."
        ),
    ] = "auto",
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability",
            help="The GPU that a cuda engine is compiled for; none need be here. (default: 9.0)",
        ),
    ] = None,
    load_format: Annotated[
        str,
        typer.Option(
            "--load-format",
            help="auto: the checkpoint's weights. dummy, planted: only its config files are read; "
            "`run` makes random weights, or ones whose text is known, on the device.",
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of dummy and planted weights. (default: 0)"),
    ] = None,
    planted_role: Annotated[
        str | None,
        typer.Option("--planted-role", help="target, or draft of a target of that seed."),
    ] = None,
    planted_acceptance: Annotated[
        float | None,
        typer.Option(
            "--planted-acceptance",
            help="Probability that a planted draft's token is the target's. (default: 0.873)",
        ),
    ] = None,
    build_config: Annotated[
        Path | None,
        typer.Option("--build-config", help="JSON file of these limits; options win over it."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="auto (as stored), float32, bfloat16 or float16. (default: auto)"
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", help="Sequences per step. (default: 8)")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max-seq-len",
            help="Prompt + output, tokens. (default: what the model was trained for)",
        ),
    ] = None,
    max_input_len: Annotated[
        int | None,
        typer.Option(
            "--max-input-len",
            help="Checked against max_seq_len; longer prompts still run, in chunks.",
        ),
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-tokens", help="Tokens per step; sizes the activations. (default: 2048)"
        ),
    ] = None,
    max_beam_width: Annotated[int | None, typer.Option("--max-beam-width", help="1.")] = None,
    max_draft_len: Annotated[
        int | None,
        typer.Option(
            "--max-draft-len", help="Draft tokens a target engine can verify at once. (default: 0)"
        ),
    ] = None,
    speculative_decoding_mode: Annotated[
        str | None,
        typer.Option(
            "--speculative-decoding-mode",
            help="draft_tokens_external, or none; implied by --max-draft-len.",
        ),
    ] = None,
    tokens_per_block: Annotated[
        int | None,
        typer.Option("--tokens-per-block", help="Tokens per KV cache block. (default: 32)"),
    ] = None,
    kv_cache_type: Annotated[str | None, typer.Option("--kv-cache-type", help="paged.")] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-dtype",
            help="auto (as the checkpoint says), fp8 (needs its scales) or none. (default: auto)",
        ),
    ] = None,
    logits_dtype: Annotated[str | None, typer.Option("--logits-dtype", help="float32.")] = None,
    gather_context_logits: Annotated[
        bool | None, typer.Option("--gather-context-logits", help="Refused: not available.")
    ] = None,
    gather_generation_logits: Annotated[
        bool,
        typer.Option("--gather-generation-logits", help="Always on: every engine has them."),
    ] = True,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Ranks built at once; an engine has one rank.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the memory plan; write nothing.")
    ] = False,
    visualize_network: Annotated[
        Path | None,
        typer.Option("--visualize-network", help="Also write the network as text to this file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON line.")
    ] = False,
    log_level: Annotated[
        str, typer.Option("--log-level", help=f"{', '.join(LOG_LEVELS)}.")
    ] = "info",
    **plugins: str | None,
) -> None:
    """Build an engine directory from a checkpoint."""
    given = {name: value for name, value in locals().items() if name in _LIMITS}
    start = time.monotonic()
    log = _logger(log_level)
    from llmctl.builder.build import plan_build, run_build

    request = _request(build_config, given)
    weights = _load_format(load_format, seed, planted_role, planted_acceptance)
    if workers > 1:
        log.info("workers %d: an engine has one rank, so one works", workers)
    engine = plan_build(
        checkpoint_dir,
        request,
        backend=backend,
        compute_capability=compute_capability,
        load_format=weights,
        plugins={name: value for name, value in plugins.items() if value is not None},
        command=shlex.join(["llmctl", *sys.argv[1:]]),
        on_kernel=lambda name, done, total: log.info("kernel %d of %d: %s", done + 1, total, name),
    )
    for notice in engine.notices:
        log.warning("note: %s", notice)
    if backend == "auto":
        log.info("backend: %s", engine.config.backend)
    if visualize_network is not None:
        visualize_network.write_text(f"{engine.network}\n")
    if not dry_run:
        if log.isEnabledFor(logging.INFO):
            _run_with_progress(engine, output_dir)
        else:
            run_build(engine, output_dir)
    summary = engine.summary() | {"output_dir": None if dry_run else str(output_dir)}
    if as_json:
        typer.echo(json.dumps(summary | {"seconds_s": time.monotonic() - start}))
    elif dry_run:
        typer.echo(_memory_plan(summary))
    else:
        elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - start))
        typer.echo(f"{output_dir}: {_gigabytes(summary['engine_bytes'])} in {elapsed}")


def _request(path: Path | None, given: dict[str, Any]) -> Any:
    """The limits of the file, with the options given on the command line over them."""
    from llmctl.builder.config import BuildRequest
    from llmctl.quantize.format import read_json

    values: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise BadConfig(f"--build-config {path} does not exist")
        values = read_json(path)
    values |= {name: value for name, value in given.items() if value is not None}
    return BuildRequest.from_mapping(values, str(path or "command line"))


def _load_format(
    name: str, seed: int | None, role: str | None, acceptance: float | None
) -> LoadFormat:
    """Raises BadConfig for options of another load format."""
    from llmctl.builder.generated import LoadFormat

    if name == "auto" and seed is not None:
        raise BadConfig("--seed is for --load-format dummy and planted")
    if name != "planted" and (role is not None or acceptance is not None):
        raise BadConfig("--planted-role and --planted-acceptance are for --load-format planted")
    default = LoadFormat()
    return LoadFormat(
        name,
        default.seed if seed is None else seed,
        default.role if role is None else role,
        default.acceptance if acceptance is None else acceptance,
    )


def _run_with_progress(engine: EnginePlan, output_dir: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from llmctl.builder.build import run_build

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("weights", total=engine.file_bytes)
        run_build(engine, output_dir, lambda num_bytes: bar.advance(task, num_bytes))


def _memory_plan(summary: dict[str, Any]) -> str:
    """The memory an engine will take, for people."""
    quantization = summary["quantization"]
    rows = {
        "model": f"{summary['architecture']}, {summary['dtype']}, backend {summary['backend']}",
        "quantization": f"weights {quantization['quant_algo'] or 'none'}, "
        f"KV cache {quantization['kv_cache_quant_algo'] or summary['dtype']}",
        "weights": _gigabytes(summary["weight_bytes"])
        + ("" if summary["load_format"] == "auto" else f", {summary['load_format']}, not stored"),
        "engine file": _gigabytes(summary["engine_bytes"]),
        "activations": f"{_gigabytes(summary['activation_bytes'])} "
        f"for {summary['max_num_tokens']} tokens a step",
        **_kernels(summary),
        "KV cache": f"{summary['kv_bytes_per_token']} bytes a token, "
        f"{_gigabytes(summary['kv_bytes_per_sequence'])} a sequence of {summary['max_seq_len']}",
        "limits": f"{summary['max_batch_size']} sequences, {summary['max_draft_len']} draft tokens",
    }
    return "\n".join(f"{name:<13} {text}" for name, text in rows.items())


def _kernels(summary: dict[str, Any]) -> dict[str, str]:
    """What only engines for a GPU have."""
    if summary["compute_capability"] is None:
        return {}
    return {
        "kernels": f"{summary['num_kernels']} for compute capability "
        f"{summary['compute_capability']}, {_gigabytes(summary['kernel_bytes'])}",
        "scratch": _gigabytes(summary["scratch_bytes"]),
    }


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _logger(level: str) -> logging.Logger:
    """A logger to stderr. Raises BadConfig for an unknown level."""
    if level not in LOG_LEVELS:
        raise BadConfig(f"--log-level is {level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    logger = logging.Logger("llmctl.build", LOG_LEVELS[level])
    logger.addHandler(logging.StreamHandler(sys.stderr))
    return logger


def _with_plugin_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace `**plugins` by one option for each row of the plugin table, for the parser."""
    signature = inspect.signature(function, eval_str=True)
    parameters = list(signature.parameters.values())[:-1]
    for option in OPTIONS.values():
        values = "|".join("model dtype" if v == "model" else v for v in option.accepted)
        text = f"{values}: {option.effect}. (default: {option.default})"
        flag = f"--{option.name.replace('_', '-')}"
        annotation = Annotated[
            str | None, typer.Option(flag, help=text, rich_help_panel="Plugins and features")
        ]
        parameters.append(
            inspect.Parameter(
                option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )

    def build(**values: Any) -> None:
        function(**values)

    build.__doc__ = function.__doc__
    # inspect and typer read this attribute; mypy does not know that functions may have it
    build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    build.__annotations__ = {p.name: p.annotation for p in parameters}
    return build


build = _with_plugin_options(_build)
