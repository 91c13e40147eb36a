"""Quantizing draft heads: the target's layers run as they are, and heads are calibrated on what
its output projection reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import BadConfig, BadTensorValue
from llmctl.publish import publish, require_place, require_space
from llmctl.quantize import calibration
from llmctl.quantize.families import EMBEDDING, HEAD
from llmctl.quantize.format import (
    CONFIG_FILE,
    QUANT_CONFIG_FILE,
    RECORD_FILE,
    dump_json,
    quantization_documents,
)
from llmctl.quantize.heads.agreement import (
    TargetRows,
    agreement,
    choose,
    count_positions,
)
from llmctl.quantize.heads.heads import DraftHeads, HeadModule
from llmctl.quantize.plan import (
    DTYPE_CODES,
    QuantizeOptions,
    Source,
    planned_linear,
    require_whole_groups,
)
from llmctl.quantize.schemes.table import WRITERS
from llmctl.quantize.writer import ShardPlan, ShardWriter, TensorPlan, plan_shards

if TYPE_CHECKING:
    import torch

    from llmctl.quantize.layers import LayerQuantizer

HELD_OUT = 8  # of so many rows one is measured and not calibrated with


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """Everything known before the first byte is written."""

    options: QuantizeOptions
    source: Source  # the target
    heads: DraftHeads
    shards: list[ShardPlan]

    @property
    def output_bytes(self) -> int:
        """Size of the weight file."""
        return sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class HeadsResult:
    """What was done, for `--json`. agreement_*: for each head the share of `positions` at which
    its likeliest token is what the target chooses, on text that no scale comes from; None where the
    text has no such position."""

    output_dir: str
    scheme: str
    dtype: str
    num_heads: int  # or steps of a recurrent one
    output_bytes: int
    positions: list[int]
    agreement_before: list[float | None]
    agreement_after: list[float | None]
    seconds_s: float


def plan_heads(options: QuantizeOptions, source: Source, heads: DraftHeads) -> HeadsPlan:
    """Decide every output tensor. Raises BadConfig (options of the target's own quantization, too
    little text), Unsupported, OutputExists and OutOfDisk."""
    for flag, found in (
        ("--kv-cache-dtype", options.kv_cache_dtype != "none"),
        ("--quantize-lm-head", options.quantize_lm_head),
    ):
        if found:
            raise BadConfig(
                f"{flag} is for the target; --draft-model-dir quantizes its heads alone",
                fix="quantize the target in a run of its own",
            )
    if options.calib_size < 2 or source.row_length < heads.num_depths + 2:
        raise BadConfig(
            f"{options.calib_size} rows of {source.row_length} tokens are too few for "
            f"{heads.num_depths} {heads.depth_word}s: one row in {HELD_OUT}, and at least one, "
            "measures them",
            fix="--calib-size 64",
        )
    require_whole_groups({name: heads.shape(path) for path, name in heads.linears.items()}, source)
    tensors = list(_planned(source, heads))
    size = sum(tensor.num_bytes for tensor in tensors)
    shards = plan_shards(tensors, size, heads.file_name)
    plan = HeadsPlan(options, source, heads, shards)
    require_place(options.output_dir)
    require_space(options.output_dir, plan.output_bytes)
    return plan


def run_heads(
    plan: HeadsPlan, progress: Callable[[int, int], None] = lambda done, total: None
) -> HeadsResult:
    """Calibrate, measure, convert and publish. `progress(layers done, layers in all)`.

    Raises BadCalibrationData, BadTensorShape, BadTensorValue, OutputExists, OutOfDisk. Whatever
    interrupts it, nothing exists under output_dir.
    """
    import torch

    from llmctl.quantize.layers import LayerQuantizer

    began = time.perf_counter()
    options, source, heads = plan.options, plan.source, plan.heads
    device, dtype = torch.device(options.device), getattr(torch, source.dtype)
    target = LayerQuantizer(
        source.checkpoint, source.model, dtype, device, source.scheme, kv_cache_algo=None
    )
    own = LayerQuantizer(heads.source, source.model, dtype, device, source.scheme, None)
    projection = target.read(EMBEDDING if source.model.is_tied else HEAD)
    rows = _target_rows(plan, target, projection, progress)
    count = max(1, len(rows.tokens) // HELD_OUT)
    held_out, calibrating = rows.split(count)
    positions = count_positions(held_out, heads.num_depths)
    with torch.inference_mode():
        module = _load(heads, projection, target.read(EMBEDDING), own)
        sizes = (heads.num_depths, heads.num_tokens)
        before = agreement(module, held_out, *sizes, device, whole=heads.attends)
        _calibrate(plan, module, calibrating, own)
        stored = dict(_quantized(plan, module, own))
        _take_stored(plan, module, stored)
        after = agreement(module, held_out, *sizes, device, whole=heads.attends)
        with publish(options.output_dir) as scratch:
            with ShardWriter(scratch, plan.shards) as writer:
                for name, tensor in stored.items():
                    writer.write(name, tensor)
            _write_documents(plan, scratch)
    return HeadsResult(
        output_dir=str(options.output_dir),
        scheme=source.scheme.qformat,
        dtype=source.dtype,
        num_heads=heads.num_depths,
        output_bytes=plan.output_bytes,
        positions=positions,
        agreement_before=_shares(before, positions),
        agreement_after=_shares(after, positions),
        seconds_s=round(time.perf_counter() - began, 3),
    )


def _shares(right: list[int], positions: list[int]) -> list[float | None]:
    return [hits / n if n else None for hits, n in zip(right, positions, strict=True)]


def _target_rows(
    plan: HeadsPlan,
    target: LayerQuantizer,
    projection: torch.Tensor,
    progress: Callable[[int, int], None],
) -> TargetRows:
    """The calibration text through the unquantized target, a layer in memory at a time."""
    import torch

    options, source = plan.options, plan.source
    tokens = calibration.read_rows(
        options.calib_dataset,
        options.model_dir / "tokenizer.json",
        num_rows=options.calib_size,
        row_length=source.row_length,
        vocab=int(source.model.config.vocab_size),
        seed=options.seed,
    )
    embedding = target.read(EMBEDDING)
    hidden = torch.nn.functional.embedding(tokens.to(embedding.device), embedding).cpu()
    del embedding
    taps: dict[int, torch.Tensor] = {}
    for index in range(source.model.num_layers):
        source.checkpoint.release()
        if index in plan.heads.taps:
            taps[index] = hidden.clone()  # the layer writes over it
        target.pass_layer(index, hidden, options.batch_size)
        progress(index + 1, source.model.num_layers)
    target.pass_norm(hidden, options.batch_size)
    read = [taps[index] for index in plan.heads.taps]
    features = torch.cat(read, dim=-1) if read else hidden
    return TargetRows(tokens, features, choose(hidden, projection))


def _load(
    heads: DraftHeads, projection: torch.Tensor, embedding: torch.Tensor, own: LayerQuantizer
) -> HeadModule:
    module = heads.make(projection, embedding)
    weights = {
        f"{path}.{kind}": own.read(f"{heads.prefix}{name}.{kind}")
        for path, name in heads.linears.items()
        for kind in (("weight", "bias") if path in heads.biases else ("weight",))
    }
    weights |= {path: own.read(f"{heads.prefix}{name}") for path, name in heads.kept.items()}
    module.load_state_dict(weights, assign=True)
    return module


def _calibrate(plan: HeadsPlan, module: HeadModule, rows: TargetRows, own: LayerQuantizer) -> None:
    from llmctl.quantize.layers import calibrate_module

    count = plan.heads.num_tokens
    length = rows.following(count).shape[1]

    def loop(found: Any) -> None:
        for _, hidden, behind in rows.batches(length, count, whole=plan.heads.attends):
            for _ in found(hidden.to(own.device), behind.to(own.device)):
                pass  # a depth at a time

    try:
        calibrate_module(module, loop, plan.source.scheme)
    except AssertionError as error:  # how ModelOpt says that a maximum is NaN
        raise BadTensorValue(
            f"calibrating the heads of {plan.heads.source.path} met values that are not finite",
            fix="check the heads' weights",
        ) from error


def _planned(source: Source, heads: DraftHeads) -> Iterator[TensorPlan]:
    for path, name in heads.linears.items():
        yield from planned_linear(f"{name}.weight", heads.shape(path), source.scheme)
        if path in heads.biases:
            yield TensorPlan(f"{name}.bias", DTYPE_CODES[source.dtype], heads.shape(path)[:1])
    for name in heads.kept.values():
        shape = heads.source.info(f"{heads.prefix}{name}").shape
        yield TensorPlan(name, DTYPE_CODES[source.dtype], shape)
    for name in heads.copied:
        info = heads.source.info(f"{heads.prefix}{name}")
        yield TensorPlan(name, info.dtype, info.shape)


def _quantized(
    plan: HeadsPlan, module: HeadModule, own: LayerQuantizer
) -> Iterator[tuple[str, torch.Tensor]]:
    from llmctl.quantize.layers import quantized_linear

    for path, name in plan.heads.linears.items():
        yield from quantized_linear(module.get_submodule(path), name, plan.source.scheme)
        if path in plan.heads.biases:
            yield f"{name}.bias", own.read(f"{plan.heads.prefix}{name}.bias")
    for name in plan.heads.kept.values():
        yield name, own.read(f"{plan.heads.prefix}{name}")
    for name in plan.heads.copied:
        yield name, plan.heads.source.read(f"{plan.heads.prefix}{name}")


def _take_stored(plan: HeadsPlan, module: HeadModule, stored: Mapping[str, torch.Tensor]) -> None:
    """Give the calibrated module the weights that readers will see; ModelOpt's own quantizers stay
    at the inputs. (They round weights to FP8, whatever the scheme.)"""
    writer = WRITERS[plan.source.scheme.name]
    for path, name in plan.heads.linears.items():
        linear: Any = module.get_submodule(path)
        values = writer.dequantize(stored[f"{name}.weight"], stored[f"{name}.weight_scale"])
        linear.weight.copy_(values)
        linear.weight_quantizer.disable()


def _write_documents(plan: HeadsPlan, scratch: Path) -> None:
    """config.json with its quantization_config, hf_quant_config.json, and how it was made."""
    nested, flat = quantization_documents(plan.source.scheme, None, [], version("nvidia-modelopt"))
    config = {**plan.heads.config, "quantization_config": flat}
    (scratch / CONFIG_FILE).write_text(dump_json(config), encoding="utf-8")
    (scratch / QUANT_CONFIG_FILE).write_text(dump_json(nested), encoding="utf-8")
    record = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(plan.options).items()
        if key != "output_dir"
    }
    record |= {"draft_model_dir": str(plan.heads.source.path), "dtype": plan.source.dtype}
    versions = {name: version(name) for name in ("llmctl", "torch", "transformers")}
    document = {"quantize": record, "versions": versions}
    (scratch / RECORD_FILE).write_text(dump_json(document), encoding="utf-8")
