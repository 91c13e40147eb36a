"""Runs a planned quantization: layer by layer, straight into the output's shards."""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.publish import publish
from llmctl.quantize import calibration
from llmctl.quantize.estimate import TimeEstimate
from llmctl.quantize.families import EMBEDDING, FINAL_NORM, HEAD
from llmctl.quantize.format import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    KV_CACHE_DTYPES,
    QUANT_CONFIG_FILE,
    RECORD_FILE,
    dump_json,
    has_file,
    quantization_documents,
)
from llmctl.quantize.plan import QuantizePlan
from llmctl.quantize.writer import ShardWriter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What was done, for `--json`."""

    output_dir: str
    scheme: str
    kv_cache_dtype: str
    dtype: str
    num_layers: int
    num_tensors: int
    output_bytes: int
    seconds_s: float
    predicted_memory_bytes: int
    peak_memory_bytes: int  # of this process, its whole life


def run_quantization(
    plan: QuantizePlan,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_estimate: Callable[[float], None] = lambda seconds: None,
) -> QuantizeResult:
    """Calibrate, convert and publish. `progress(layers done, layers in all)` after each layer;
    `on_estimate(seconds of calibration in all)` once, after the first batches.

    Raises BadCalibrationData, BadTensorValue, OutputExists, OutOfDisk. Whatever interrupts it,
    nothing exists under output_dir.
    """
    start = time.perf_counter()
    options = plan.options
    rows = calibration.read_rows(
        options.calib_dataset,
        options.model_dir / "tokenizer.json",
        num_rows=options.calib_size,
        row_length=plan.row_length,
        vocab=int(plan.model.config.vocab_size),
        seed=options.seed,
    )
    with publish(options.output_dir) as scratch:
        with ShardWriter(scratch, plan.shards) as writer:
            _write_tensors(plan, rows, writer, progress, on_estimate)
        _write_documents(plan, scratch)
    return QuantizeResult(
        output_dir=str(options.output_dir),
        scheme=plan.scheme.qformat,
        kv_cache_dtype=options.kv_cache_dtype,
        dtype=plan.dtype,
        num_layers=plan.model.num_layers,
        num_tensors=plan.num_tensors,
        output_bytes=plan.output_bytes,
        seconds_s=round(time.perf_counter() - start, 3),
        predicted_memory_bytes=plan.peak_memory_bytes,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _write_tensors(
    plan: QuantizePlan,
    rows: torch.Tensor,
    writer: ShardWriter,
    progress: Callable[[int, int], None],
    on_estimate: Callable[[float], None],
) -> None:
    import torch

    from llmctl.quantize.layers import LayerQuantizer

    options, total = plan.options, plan.model.num_layers
    quantizer = LayerQuantizer(
        plan.checkpoint,
        plan.model,
        getattr(torch, plan.dtype),
        torch.device(options.device),
        plan.scheme,
        KV_CACHE_DTYPES[options.kv_cache_dtype],
    )
    embedding = quantizer.read(EMBEDDING)
    hidden = torch.nn.functional.embedding(rows.to(embedding.device), embedding).cpu()
    writer.write(EMBEDDING, embedding)
    del embedding
    estimate = TimeEstimate(total * math.ceil(len(rows) / options.batch_size), on_estimate)
    for index in range(total):
        plan.checkpoint.release()
        for name, tensor in quantizer.run_layer(
            index, hidden, options.batch_size, estimate.batch_done
        ):
            writer.write(name, tensor)
        progress(index + 1, total)
    writer.write(FINAL_NORM, quantizer.read(FINAL_NORM))
    if options.quantize_lm_head:
        for name, tensor in quantizer.run_head(hidden, options.batch_size):
            writer.write(name, tensor)
    elif not plan.model.is_tied:
        writer.write(HEAD, quantizer.read(HEAD))


def _write_documents(plan: QuantizePlan, scratch: Path) -> None:
    """config.json with its quantization_config, hf_quant_config.json, tokenizer files, record."""
    options = plan.options
    excluded = (
        ["model.embed_tokens"] if options.quantize_lm_head else ["lm_head", "model.embed_tokens"]
    )
    nested, flat = quantization_documents(
        plan.scheme,
        KV_CACHE_DTYPES[options.kv_cache_dtype],
        excluded,
        version("nvidia-modelopt"),
    )
    config = dict(plan.checkpoint.config)
    if options.dtype != "auto":
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = plan.dtype
    if config.get("tie_word_embeddings") and not plan.model.is_tied:
        config["tie_word_embeddings"] = False  # the file holds two, and the output has both
    config["quantization_config"] = flat
    (scratch / CONFIG_FILE).write_text(dump_json(config), encoding="utf-8")
    (scratch / QUANT_CONFIG_FILE).write_text(dump_json(nested), encoding="utf-8")
    generation = options.model_dir / GENERATION_CONFIG_FILE
    for path in [
        *plan.checkpoint.tokenizer_files(),
        *([generation] if has_file(generation) else []),
    ]:
        shutil.copyfile(path, scratch / path.name)
    record = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(options).items()
        if key != "output_dir"
    }
    record |= {"dtype": plan.dtype, "calib_seq_length": plan.row_length}
    versions = {name: version(name) for name in ("llmctl", "torch", "transformers")}
    document = {"quantize": record, "versions": versions}
    (scratch / RECORD_FILE).write_text(dump_json(document), encoding="utf-8")
