"""Planning a quantization: no writes; every output tensor, the disk and the memory are decided.

Peak memory is the imports, one layer in the source's dtype and quantized, the hidden states of all
calibration tokens and the activations of one batch. It does not depend on the number of layers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    MissingPackage,
    NoDevice,
    OutOfMemory,
    TokenizerError,
    Unsupported,
)
from llmctl.plugins.backends.host_memory import free_memory_bytes
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.publish import require_place, require_space
from llmctl.quantize import calibration
from llmctl.quantize.checkpoint import DTYPES, Checkpoint
from llmctl.quantize.families import EMBEDDING, FINAL_NORM, HEAD, Model, layer_prefix, read_model
from llmctl.quantize.format import KV_CACHE_DTYPES, find_scheme, has_file
from llmctl.quantize.schemes.table import WRITERS
from llmctl.quantize.writer import ShardPlan, TensorPlan, plan_shards

DTYPE_CODES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
IMPORT_BYTES = 620_000_000  # resident after importing torch, transformers and ModelOpt 0.47


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What to do; the fields are the options of `llmctl quantize`. Raises BadConfig."""

    model_dir: Path
    output_dir: Path
    qformat: str = "fp8"
    kv_cache_dtype: str = "none"
    calib_dataset: str = calibration.DEMO_DATASET
    calib_size: int = 512
    calib_max_seq_length: int = 512
    batch_size: int = 1
    dtype: str = "auto"
    device: str = "cpu"
    tp_size: int = 1
    seed: int = 1234
    quantize_lm_head: bool = False
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        for name in ("calib_size", "calib_max_seq_length", "batch_size", "tp_size"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.max_shard_bytes < 1:
            raise BadConfig(f"max_shard_bytes is {self.max_shard_bytes}; it must be positive")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise BadConfig(f"kv_cache_dtype is {self.kv_cache_dtype!r}; one of {known}")
        if self.dtype not in ("auto", *DTYPE_CODES):
            raise BadConfig(f"dtype is {self.dtype!r}; one of auto, {', '.join(DTYPE_CODES)}")
        if self.device not in ("cpu", "cuda"):
            raise BadConfig(f"device is {self.device!r}; one of cpu, cuda")


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Everything known before the first byte is written."""

    options: QuantizeOptions
    checkpoint: Checkpoint
    model: Model
    scheme: QuantizedScheme
    dtype: str
    row_length: int
    shards: list[ShardPlan]
    peak_memory_bytes: int  # predicted, resident on the host

    @property
    def output_bytes(self) -> int:
        """Size of the weight files."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def num_tensors(self) -> int:
        """Tensors in the output."""
        return sum(len(shard.offsets) for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Source:
    """The unquantized checkpoint that a run starts from, checked, and what it decides."""

    checkpoint: Checkpoint
    model: Model
    scheme: QuantizedScheme
    dtype: str
    row_length: int


def open_source(options: QuantizeOptions) -> Source:
    """Check the checkpoint, the tokenizer, the text and the device.

    Raises the errors of Checkpoint.open and read_model, Unsupported, BadCalibrationData,
    TokenizerError, MissingPackage, NoDevice.
    """
    scheme = find_scheme(options.qformat)
    checkpoint = Checkpoint.open(options.model_dir)
    if checkpoint.quantization is not None:
        found = checkpoint.quantization
        raise Unsupported(
            f"{options.model_dir} is quantized already ({found.method}, {found.algo})",
            fix="start from the unquantized checkpoint, or build an engine from this one",
        )
    if not has_file(options.model_dir / "tokenizer.json"):
        raise TokenizerError(
            f"{options.model_dir} has no tokenizer.json",
            fix="AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one",
        )
    calibration.check_dataset(options.calib_dataset)
    require_modelopt()
    _require_device(options.device)
    model = read_model(checkpoint)
    dtype = _pick_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    limit = getattr(model.config, "max_position_embeddings", None)
    row_length = min(options.calib_max_seq_length, limit or options.calib_max_seq_length)
    return Source(checkpoint, model, scheme, dtype, row_length)


def plan_quantization(options: QuantizeOptions) -> QuantizePlan:
    """Check the source, disk and memory; decide every output tensor.

    Raises what `open_source` raises, Unsupported, OutputExists, OutOfDisk, OutOfMemory.
    """
    source = open_source(options)
    checkpoint, model, scheme = source.checkpoint, source.model, source.scheme
    dtype, row_length = source.dtype, source.row_length
    if options.quantize_lm_head and model.is_tied:
        raise Unsupported("--quantize-lm-head: this model's lm_head is its embedding")
    prefix = layer_prefix(0)
    linears = {f"{prefix}{n}": model.layer_shapes[f"{n}.weight"] for n in model.linear_names}
    if options.quantize_lm_head:
        linears["lm_head"] = model.outer_shapes[HEAD]
    require_whole_groups(linears, source)
    tensors = list(_planned_tensors(model, scheme, DTYPE_CODES[dtype], options))
    shards = plan_shards(tensors, options.max_shard_bytes)
    peak = _predict_memory(model, scheme, DTYPES[DTYPE_CODES[dtype]][1], row_length, options)
    plan = QuantizePlan(options, checkpoint, model, scheme, dtype, row_length, shards, peak)
    require_place(options.output_dir)
    require_space(options.output_dir, plan.output_bytes)
    available = free_memory_bytes()
    if peak > available:
        raise OutOfMemory(
            f"quantizing needs about {peak / 1e9:.1f} GB, {available / 1e9:.1f} GB are available",
            fix="lower --calib-size or --batch-size",
        )
    return plan


def require_modelopt() -> None:
    """Raises MissingPackage, with the command to install, unless the `quantize` extra is there."""
    for name in ("modelopt", "requests", "transformers"):  # modelopt 0.47 imports requests
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(
                f"`llmctl quantize` needs {name}, which is not installed",
                fix="pip install 'llmctl[quantize]'",
            )


def _require_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise NoDevice("--device cuda: torch sees no CUDA device", fix="--device cpu")


def require_whole_groups(linears: Mapping[str, tuple[int, ...]], source: Source) -> None:
    """Raises Unsupported for a linear [out, in] whose inputs the scheme cannot cut into its
    groups."""
    block, qformat = source.scheme.storage.block, source.scheme.qformat
    for name, (_, inputs) in linears.items():
        if inputs % (block or 1):
            raise Unsupported(
                f"--qformat {qformat}: {name} has {inputs} inputs; a multiple of {block} is wanted",
                fix="--qformat fp8",
            )


def _pick_dtype(checkpoint: Checkpoint) -> str:
    """The dtype config.json states, else the one of the embedding."""
    names = {code: name for name, code in DTYPE_CODES.items()}
    stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if stated in DTYPE_CODES:
        return str(stated)
    info = checkpoint.info(EMBEDDING)
    if info.dtype not in names:
        raise BadTensorShape(
            f"{info.name} in {info.file} has dtype {info.dtype}; {', '.join(names)} are read"
        )
    return names[info.dtype]


def _planned_tensors(
    model: Model, scheme: QuantizedScheme, dtype: str, options: QuantizeOptions
) -> Iterator[TensorPlan]:
    """Every tensor of the output, in the order in which it will be written."""
    outer = model.outer_shapes
    linears = {f"{name}.weight" for name in model.linear_names}
    yield TensorPlan(EMBEDDING, dtype, outer[EMBEDDING])
    for index in range(model.num_layers):
        prefix = layer_prefix(index)
        for name, shape in model.layer_shapes.items():
            if name in linears:
                yield from planned_linear(prefix + name, shape, scheme)
            else:
                yield TensorPlan(prefix + name, dtype, shape)
        if KV_CACHE_DTYPES[options.kv_cache_dtype]:
            yield TensorPlan(f"{prefix}self_attn.k_proj.k_scale", "F32", ())
            yield TensorPlan(f"{prefix}self_attn.v_proj.v_scale", "F32", ())
    yield TensorPlan(FINAL_NORM, dtype, outer[FINAL_NORM])
    if options.quantize_lm_head:
        yield from planned_linear(HEAD, outer[HEAD], scheme)
    elif not model.is_tied:
        yield TensorPlan(HEAD, dtype, outer[HEAD])


def planned_linear(
    name: str, shape: tuple[int, ...], scheme: QuantizedScheme
) -> Iterator[TensorPlan]:
    """name ends in `weight`; shape is [out, in]."""
    storage = scheme.storage
    yield TensorPlan(name, storage.dtype, storage.weight_shape(*shape))
    yield TensorPlan(f"{name}_scale", storage.scale_dtype, storage.scale_shape(*shape))
    yield TensorPlan(f"{name.removesuffix('weight')}input_scale", "F32", ())


def _predict_memory(
    model: Model, scheme: QuantizedScheme, itemsize: int, row_length: int, options: QuantizeOptions
) -> int:
    """Resident bytes at the peak: an upper estimate, within a factor of two where measured."""
    config, outer = model.config, model.outer_shapes
    largest = max(math.prod(shape) for shape in model.layer_shapes.values())
    layer = sum(math.prod(shape) for shape in model.layer_shapes.values()) * itemsize
    # The layer, and its largest weight once divided by its scale, in the source's dtype and FP8
    # (codes are smaller), and what the scheme needs beside that.
    piece = WRITERS[scheme.name].work_bytes
    layer_step = layer + largest * (itemsize + 1) + piece
    head_step = math.prod(outer[EMBEDDING]) * (2 * itemsize + 1) + piece
    tokens = options.calib_size * row_length
    hidden = tokens * int(config.hidden_size) * itemsize + tokens * 8  # states and token ids
    batch_tokens = min(options.batch_size, options.calib_size) * row_length
    widest = 3 * int(config.intermediate_size) + 6 * int(config.hidden_size)
    if options.quantize_lm_head:
        widest = max(widest, int(config.vocab_size))
    activations = batch_tokens * widest * itemsize
    return IMPORT_BYTES + hidden + max(layer_step + activations, head_step)
