"""`llmctl build`: checkpoint -> engine directory.

Options are those of trtllm-build. The plugin options come from the table in
`builder/plugin_config.py`: each has its effect in the help, and a value that cannot be honoured is
refused with the reason. Heavy imports happen inside the command, so `--help` stays fast.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from llmctl.builder.backends import is_auto
from llmctl.builder.speculative_modes import available_modes
from llmctl.cli.build.limits import advise_limits
from llmctl.cli.build.options import (
    LIMITS,
    LOG_LEVELS,
    Sign,
    VisualizeNetwork,
    build_request,
    make_load_format,
    make_logger,
    read_signing_key,
    require_one_purpose,
    require_picture_file,
    with_table_options,
)
from llmctl.cli.build.result import print_key, print_result, write_engine
from llmctl.cli.output_files import replacing, require_new_folder
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.plugins.schemes.table import titles


def _build(
    checkpoint_dir: Annotated[
        Path,
        typer.Option(
            "--checkpoint-dir",
            help=f"Hugging Face folder: 16 or 32 bits, {titles()}.",
        ),
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Engine directory to create.")
    ] = Path("engine_outputs"),
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="|".join(("auto", *BACKENDS)),
            help="What runs the engine; auto: cuda if a GPU for it is present, else cpu.",
        ),
    ] = "auto",
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability",
            help="GPUs to compile for; none has to be present. cuda: 9.0. "
            "tensorrt-rtx: a list of 8.6, 8.9, 12.0. (default: all that serve the model)",
            hidden=True,
        ),
    ] = None,
    load_format: Annotated[
        str,
        typer.Option(
            "--load-format",
            help="auto: the checkpoint's weights. dummy, planted: only its config files are read; "
            "`run` makes random weights, or ones whose text is known, on the device.",
            hidden=True,
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of dummy and planted weights. (default: 0)", hidden=True),
    ] = None,
    planted_role: Annotated[
        str | None,
        typer.Option("--planted-role", help="target, or draft of that seed's target.", hidden=True),
    ] = None,
    planted_acceptance: Annotated[
        float | None,
        typer.Option(
            "--planted-acceptance",
            help="Probability that a planted draft's or head's token is right. (default: 0.873)",
            hidden=True,
        ),
    ] = None,
    planted_head_qformat: Annotated[
        str | None,
        typer.Option(
            "--planted-head-qformat",
            help="--qformat of planted draft heads. (default: the checkpoint's)",
            hidden=True,
        ),
    ] = None,
    build_config: Annotated[
        Path | None,
        typer.Option("--build-config", help="JSON file of these limits; options override it."),
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
            help="Prompt + output, tokens. (default: the model's maximum)",
        ),
    ] = None,
    max_input_len: Annotated[
        int | None,
        typer.Option(
            "--max-input-len",
            help="Checked against max_seq_len; longer prompts still run, in chunks.",
            hidden=True,
        ),
    ] = None,
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-tokens", help="Tokens per step; sizes the activations. (default: 2048)"
        ),
    ] = None,
    max_beam_width: Annotated[
        int | None, typer.Option("--max-beam-width", help="Only 1.", hidden=True)
    ] = None,
    max_draft_len: Annotated[
        int | None,
        typer.Option(
            "--max-draft-len", help="Draft tokens per sequence and step to verify. (default: 0)"
        ),
    ] = None,
    speculative_decoding_mode: Annotated[
        str | None,
        typer.Option(
            "--speculative-decoding-mode",
            help=f"{available_modes()}. (default with --max-draft-len: draft_tokens_external)",
        ),
    ] = None,
    tokens_per_block: Annotated[
        int | None,
        typer.Option("--tokens-per-block", help="Tokens per KV cache block. (default: 32)"),
    ] = None,
    kv_cache_type: Annotated[
        str | None,
        typer.Option("--kv-cache-type", help="paged; continuous: one TensorRT plan.", hidden=True),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-dtype",
            help="auto (as the checkpoint says), fp8 or int8 (need its scales), none. "
            "(default: auto)",
        ),
    ] = None,
    kv_cache_unit_scales: Annotated[
        bool | None,
        typer.Option(
            "--kv-cache-unit-scales",
            help="Scales of 1 for an FP8 KV cache that has none; values beyond 448 are clipped.",
            hidden=True,
        ),
    ] = None,
    logits_dtype: Annotated[
        str | None, typer.Option("--logits-dtype", help="Only float32.", hidden=True)
    ] = None,
    gather_context_logits: Annotated[
        bool | None,
        typer.Option("--gather-context-logits", help="Refused: not available.", hidden=True),
    ] = None,
    gather_generation_logits: Annotated[
        bool,
        typer.Option(
            "--gather-generation-logits", help="Always on: every engine has them.", hidden=True
        ),
    ] = True,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=1, help="Most ranks at a time; they are built one by one.", hidden=True
        ),
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what fits in memory; write nothing.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="For --dry-run: h200, h100, l40s, rtx-4090, ... (default: the one here)",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory", min=0.1, max=1e6, metavar="GB", help="For --dry-run: memory of the GPU."
        ),
    ] = None,
    cache_key: Annotated[
        bool,
        typer.Option(
            "--cache-key",
            help="Print a hash of everything that goes into the engine; write nothing.",
        ),
    ] = False,
    sign: Sign = None,
    visualize_network: VisualizeNetwork = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON line.")
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            "--log-level",
            metavar="|".join(LOG_LEVELS),
            help="Least severe messages on stderr.",
        ),
    ] = "info",
    **others: Any,
) -> None:
    """Build an engine directory from a checkpoint.

    Examples:
      llmctl build --checkpoint-dir out/target-fp8 --max-draft-len 4 --output-dir out/target
      llmctl build --checkpoint-dir out/draft-fp8 --output-dir out/draft --json
      llmctl build --checkpoint-dir out/target-fp8 --gpu h200 --dry-run
    """
    draft_tp = others.pop("draft_tp")
    given = {name: value for name, value in (locals() | others).items() if name in LIMITS}
    start, log = time.monotonic(), make_logger(log_level)
    require_one_purpose(dry_run, cache_key, (gpu, gpu_memory), visualize_network)
    from llmctl.builder.build import plan_build
    from llmctl.cli.build.draft_ranks import with_draft_ranks
    from llmctl.cli.build.dry_run import backend_for, needs_binaries

    request = build_request(build_config, given)
    planted = planted_role, planted_acceptance, planted_head_qformat
    weights = make_load_format(load_format, seed, *planted, checkpoint_dir, writes_nothing=dry_run)
    if workers > 1:
        log.info("workers %d: ranks are written one after the other, so one works", workers)
    key = read_signing_key(sign, writes_nothing=dry_run or cache_key)
    if not cache_key and not dry_run:
        require_new_folder(output_dir)
    require_picture_file(visualize_network, output_dir)
    chosen = backend_for(backend, gpu)
    plan = partial(
        plan_build,
        checkpoint_dir,
        backend=chosen,
        compute_capability=compute_capability,
        load_format=weights,
        plugins={k: v for k, v in others.items() if v is not None and k not in LIMITS},
        command=shlex.join(["llmctl", *sys.argv[1:]]),
        on_kernel=lambda name, done, total: log.info("kernel %d of %d: %s", done + 1, total, name),
        with_binaries=not cache_key and (not dry_run or needs_binaries(chosen)),
    )
    request = with_draft_ranks(draft_tp, request, plan, gpu, log)
    engine = plan(request)
    if cache_key:
        print_key(engine, as_json)
        return
    missing = () if weights.has_files else ("no weights are here; config.json says which",)
    advice = () if dry_run else advise_limits(engine, plan, request, given)
    for notice in (*missing, *engine.notices, *advice):
        log.warning("note: %s", notice)
    if is_auto(backend):
        log.info("backend: %s", engine.config.backend)
    with ExitStack() as network:  # both or neither: the text is on the disk before the engine
        if visualize_network is not None:
            file = network.enter_context(replacing(visualize_network, "w"))
            print(engine.network, file=file, flush=True)
        if not dry_run:
            write_engine(engine, output_dir, key, with_progress=log.isEnabledFor(logging.INFO))
    if dry_run:
        from llmctl.cli.build.dry_run_text import print_plan

        print_plan(engine, output_dir, gpu, gpu_memory, as_json, plan, request)
        return
    print_result(engine, output_dir, key, time.monotonic() - start, as_json)


build = with_table_options(_build)
