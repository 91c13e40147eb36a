"""`llmctl inspect` of a checkpoint: config.json and the headers of its files.

Tensors that differ only in their layer are one row. Of the weights nothing is read; of the scales
that quantization stored, one per tensor, row or block, the smallest and largest are shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmctl.builder.heads.medusa.checkpoint import SAFE_FILE as HEADS_FILE
from llmctl.plugins.schemes.scheme import E8M0, E8M0_BIAS
from llmctl.quantize.checkpoint import DTYPES, Checkpoint, TensorInfo, read_header
from llmctl.quantize.format import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    QuantizationInfo,
    has_file,
    read_json,
    read_stated_quantization,
)

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCALE = re.compile(r"(_scale(_inv|_2)?|\.(k|v|input|output|weight)_scale|_scaling_factor)$")
_SCALE_DTYPES = ("F32", "F16", "BF16")
# A tensor: one scale a row of the largest linears is less, and so are a byte for 32 of an 8B model.
_MAX_SCALE_BYTES = 2 << 20


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """The object that `--json` prints. Raises what `Checkpoint.open` raises."""
    checkpoint = _open(folder)
    tensors = list(checkpoint.tensors.values())
    groups = _groups(tensors)
    return {
        "path": str(folder),
        "model": _model(checkpoint.config),
        "quantization": _quantization(checkpoint.quantization),
        "num_tensors": len(tensors),
        "num_values": sum(_num_values(info, checkpoint) for info in tensors),
        "bytes": sum(info.num_bytes for info in tensors),
        "dtypes": _dtypes(tensors),
        "tensors": [_group(name, infos) for (name, _, _), infos in groups.items()],
        "scales": [
            _scales(checkpoint, name, infos)
            for (name, _, _), infos in groups.items()
            if _SCALE.search(name)
        ],
        "files": _files(checkpoint),
    }


def _open(folder: Path) -> Checkpoint:
    """A checkpoint, or Medusa heads, whose file has another name and whose config.json names no
    model, or is absent."""
    heads = folder / HEADS_FILE
    if not has_file(heads) or any(has_file(folder / name) for name in (SINGLE_FILE, INDEX_FILE)):
        return Checkpoint.open(folder)
    path = folder / CONFIG_FILE
    config = {"model_type": "medusa"} | (read_json(path) if has_file(path) else {})
    quantization = read_stated_quantization(folder, config)
    return Checkpoint(folder, config, read_header(heads), quantization)


def _num_values(info: TensorInfo, checkpoint: Checkpoint) -> int:
    """Elements; of a quantized weight, which has scales, the values that these hold."""
    found = checkpoint.quantization
    values = 1
    if found is not None and found.scheme is not None:
        storage = found.scheme.storage
        if info.dtype == storage.dtype and f"{info.name}_scale" in checkpoint.tensors:
            values = storage.values
    return values * math.prod(info.shape)


def _model(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json that name the model; absent ones are None."""
    names = (
        "architectures",
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope_scaling",
    )
    dtype = config.get("dtype", config.get("torch_dtype"))
    return {name: config.get(name) for name in names} | {"dtype": dtype}


def _quantization(info: QuantizationInfo | None) -> dict[str, Any] | None:
    if info is None:
        return None
    return {
        "method": info.method,
        "algo": info.algo,
        "kv_cache_algo": info.kv_cache_algo,
        "weight_scales": info.weight_strategy,
        "activation_scales": info.activations,
        "exclude": list(info.exclude),
    }


def _dtypes(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    """dtype -> tensors and bytes, the most bytes first."""
    found: dict[str, dict[str, int]] = {}
    for info in tensors:
        row = found.setdefault(DTYPES[info.dtype][0], {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += info.num_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


Key = tuple[str, str, tuple[int, ...]]  # name with its layer as N, dtype, shape


def _groups(tensors: Iterable[TensorInfo]) -> dict[Key, list[TensorInfo]]:
    groups: dict[Key, list[TensorInfo]] = {}
    for info in sorted(tensors, key=lambda info: _order(info.name)):
        key = _LAYER.sub(".layers.N.", info.name), info.dtype, info.shape
        groups.setdefault(key, []).append(info)
    return groups


def _order(name: str) -> tuple[int, str]:
    """Layers by number; tensors before and after the layers by name."""
    layer = _LAYER.search(name)
    return (int(layer[1]), name) if layer else (-1, name)


def _group(name: str, infos: Sequence[TensorInfo]) -> dict[str, Any]:
    layers = [int(found[1]) for info in infos if (found := _LAYER.search(info.name))]
    return {
        "name": name,
        "dtype": DTYPES[infos[0].dtype][0],
        "shape": list(infos[0].shape),
        "count": len(infos),
        "layers": layers,
        "bytes": sum(info.num_bytes for info in infos),
    }


def _scales(checkpoint: Checkpoint, name: str, infos: Sequence[TensorInfo]) -> dict[str, Any]:
    """The range of the values of one kind of scale over all layers, and where its ends are.

    The ends are None where nothing was read; values that are no numbers are counted apart."""
    smallest: tuple[float, str] | None = None
    largest: tuple[float, str] | None = None
    non_finite = 0
    for info in infos:
        values = _values(checkpoint, info)
        finite = values[np.isfinite(values)]
        non_finite += len(values) - len(finite)
        if len(finite):
            low, high = (float(finite.min()), info.name), (float(finite.max()), info.name)
            smallest = low if smallest is None else min(smallest, low)
            largest = high if largest is None else max(largest, high)
    return {
        "name": name,
        "count": len(infos),
        "values_each": math.prod(infos[0].shape),
        "smallest": smallest and smallest[0],
        "smallest_in": smallest and smallest[1],
        "largest": largest and largest[0],
        "largest_in": largest and largest[1],
        "non_finite": non_finite,
    }


def _values(checkpoint: Checkpoint, info: TensorInfo) -> NDArray[np.float32]:
    """A scale's values; none of one that is too large, or no floats and no powers of two."""
    if info.num_bytes > _MAX_SCALE_BYTES or info.dtype not in (*_SCALE_DTYPES, E8M0):
        return np.empty(0, np.float32)
    if info.dtype == E8M0:
        powers = np.full(256, np.nan, np.float32)
        powers[:255] = np.ldexp(np.float32(1), np.arange(255) - E8M0_BIAS)  # exp2 rounds
        found: NDArray[np.float32] = powers[checkpoint.read(info.name).numpy().ravel()]
        return found
    return np.atleast_1d(checkpoint.read(info.name).float().numpy()).ravel()


def _files(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    files = sorted(path for path in checkpoint.path.iterdir() if path.is_file())
    return [{"name": path.name, "bytes": path.stat().st_size} for path in files]
