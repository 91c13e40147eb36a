"""`llmctl quantize`: Hugging Face checkpoint -> quantized checkpoint.

Options are those of TensorRT-LLM's quantize.py where the idea is the same. Heavy imports happen
inside the command, so `--help` stays fast.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.output_files import require_new_folder
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.schemes.table import quantized_schemes

if TYPE_CHECKING:
    from rich.console import Console

    from llmctl.quantize.plan import QuantizePlan
    from llmctl.quantize.quantizer import QuantizeResult

LONG_S = 60.0  # of calibration: it is announced
_QFORMATS = " or ".join(scheme.qformat for scheme in quantized_schemes())
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def quantize(
    model_dir: Annotated[
        Path, typer.Option("--model-dir", help="Checkpoint in Hugging Face format.")
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Folder to create for the quantized checkpoint.")
    ] = Path("exported_model"),
    draft_model_dir: Annotated[
        Path | None,
        typer.Option(
            "--draft-model-dir",
            help="Folder of draft heads for that checkpoint (Medusa, ReDrafter or EAGLE): quantize "
            "them instead of it.",
        ),
    ] = None,
    qformat: Annotated[
        str, typer.Option("--qformat", help=f"Quantization scheme: {_QFORMATS}.")
    ] = "fp8",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="fp8, int8, or none to keep the model's dtype.")
    ] = "none",
    calib_dataset: Annotated[
        str,
        typer.Option(
            "--calib-dataset",
            help="demo (text that comes with llmctl) or a .txt, .jsonl or .parquet file.",
        ),
    ] = "demo",
    calib_size: Annotated[
        int, typer.Option("--calib-size", min=1, help="Rows of calibration tokens.")
    ] = 512,
    calib_max_seq_length: Annotated[
        int, typer.Option("--calib-max-seq-length", min=1, help="Tokens per row.")
    ] = 512,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Rows calibrated together.")
    ] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="Dtype of unquantized tensors: auto (as stored) or float16, …"
        ),
    ] = "auto",
    device: Annotated[
        str, typer.Option("--device", help="Where calibration runs: cpu or cuda.")
    ] = "cpu",
    tp_size: Annotated[
        int,
        typer.Option("--tp-size", min=1, help="Recorded; the checkpoint itself is never split."),
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Order of the calibration text.")] = 1234,
    quantize_lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="Also quantize lm_head.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Largest weight file, such as 5GB.")
    ] = "5GB",
    export_format: Annotated[
        str, typer.Option("--export-format", help="hf is the only layout written.")
    ] = "hf",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON line.")
    ] = False,
) -> None:
    """Quantize a checkpoint with ModelOpt, one layer in memory at a time.

    Examples:
      llmctl quantize --model-dir examples/demo-target --kv-cache-dtype fp8 --calib-size 32 \\
        --output-dir out/target-fp8
      llmctl quantize --model-dir examples/demo-target --draft-model-dir examples/demo-medusa \\
        --calib-size 64 --output-dir out/medusa-fp8
    """
    if export_format != "hf":
        raise Unsupported(f"--export-format {export_format}: only hf is written")
    # Read by the OpenMP library when torch is imported. Its threads spin while they wait for each
    # other, and where other programs use the cores too, that keeps the very thread that they wait
    # for from running: calibration took 5 to 14 times the CPU time (docs/quantize.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from llmctl.quantize.plan import QuantizeOptions, plan_quantization

    options = QuantizeOptions(
        model_dir=model_dir,
        output_dir=output_dir,
        qformat=qformat,
        kv_cache_dtype=kv_cache_dtype,
        calib_dataset=calib_dataset,
        calib_size=calib_size,
        calib_max_seq_length=calib_max_seq_length,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        tp_size=tp_size,
        seed=seed,
        quantize_lm_head=quantize_lm_head,
        max_shard_bytes=parse_size(max_shard_size),
    )
    require_new_folder(output_dir)
    if draft_model_dir is not None:
        from llmctl.cli.quantize_heads import quantize_heads

        quantize_heads(options, draft_model_dir, as_json)
        return
    plan = plan_quantization(options)
    result = _run_with_progress(plan)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        typer.echo(
            f"{result.output_dir}: {result.num_tensors} tensors, "
            f"{result.output_bytes / 1e9:.3g} GB, {result.seconds_s:.1f} s, "
            f"peak memory {result.peak_memory_bytes / 1e9:.2f} GB"
        )


def _run_with_progress(plan: QuantizePlan) -> QuantizeResult:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from llmctl.plugins.backends.host_memory import free_memory_bytes
    from llmctl.quantize.quantizer import run_quantization

    console = Console(stderr=True, highlight=False)
    options = plan.options
    console.print(
        f"{plan.scheme.qformat} weights and activations, KV cache {options.kv_cache_dtype}, "
        f"{plan.dtype} otherwise; {options.calib_size} rows of {plan.row_length} tokens "
        f"from {options.calib_dataset}, on {options.device}",
        soft_wrap=True,
    )
    console.print(
        f"needs about {plan.peak_memory_bytes / 1e9:.2f} GB of memory "
        f"({free_memory_bytes() / 1e9:.1f} GB available) and "
        f"{plan.output_bytes / 1e9:.3g} GB of disk",
        soft_wrap=True,
    )
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("layers", total=plan.model.num_layers)
        return run_quantization(
            plan,
            progress=lambda done, total: bar.update(task, completed=done),
            on_estimate=lambda seconds_s: _tell_time(console, plan, seconds_s),
        )


def _tell_time(console: Console, plan: QuantizePlan, seconds_s: float) -> None:
    """How long calibration will take, where that is worth knowing before it is over."""
    if seconds_s < LONG_S:
        return
    text = f"calibration will take about {seconds_s / 60:.1f} minutes at this speed"
    if plan.options.device == "cpu":
        text += "; half the --calib-size takes half of it"
        if plan.dtype == "float16":  # what oneDNN has no kernels for on most CPUs
            text += ", and --dtype bfloat16 is several times as fast on most CPUs"
    console.print(text, soft_wrap=True)


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB", "500 MB" or "1000". Raises BadConfig."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise BadConfig(f"--max-shard-size is {text!r}; a size such as 5GB or 500MB is wanted")
    return int(float(found[1]) * SIZE_UNITS[found[2] or ""])
