"""What an engine's config.json says about its origin: the model, its files, the software."""

from __future__ import annotations

import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from llmctl.builder.engine_format import KvCacheSpec
from llmctl.builder.kv_cache import ALGOS as KV_ALGOS
from llmctl.builder.models.family import ModelConfig
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.format import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    RECORD_FILE,
    check_end_ids,
    has_file,
    read_json,
)

SAFE_SUFFIX = ".safetensors"
_PACKAGES = ("llmctl", "torch", "numpy", "safetensors")


def pretrained_config(
    model: ModelConfig, dtype: str, checkpoint: Checkpoint, cache: KvCacheSpec, tp_size: int
) -> dict[str, Any]:
    """The model under TensorRT-LLM's field names, plus what its later use needs."""
    info = checkpoint.quantization
    return {
        "architecture": model.family.architecture,
        "model_type": model.family.model_type,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_size,
        "hidden_act": "silu",
        "norm_epsilon": model.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": model.max_position_embeddings,
        "rotary_base": model.rope.theta,
        "rotary_scaling": {"rope_type": model.rope.rope_type, **dict(model.rope.parameters)},
        "rotary_embedding_dim": model.head_size,
        "logits_dtype": "float32",
        "qk_layernorm": model.family.has_qk_norm,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_windows": list(cache.windows),
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "cp_size": 1},
        "quantization": {
            "quant_algo": info.algo if info else None,
            "kv_cache_quant_algo": KV_ALGOS.get(cache.dtype),
            "exclude_modules": list(info.exclude) if info else None,
        },
        **_special_ids(checkpoint, model.vocab_size),
    }


def _special_ids(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """eos, bos and pad ids: generation_config.json decides, as it does for transformers, because
    chat models list their end-of-turn ids only there. A value is an id, a list of ids or null.
    Raises CorruptFile for others.
    """
    path = checkpoint.path / GENERATION_CONFIG_FILE
    generation = read_json(path) if has_file(path) else {}
    check_end_ids(generation, vocab_size, str(path))
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    return {name: generation.get(name, checkpoint.config.get(name)) for name in names}


def describe_source(checkpoint: Checkpoint) -> dict[str, Any]:
    """Which checkpoint this was, and what `llmctl quantize` made it from; sha256 of config.json and
    of every safetensors header + its size.

    A header holds every name, dtype, shape and offset; hashing 140 GB of values would take
    minutes and is left to whoever needs it.
    """
    files: dict[str, Any] = {
        "config.json": {
            "sha256": sha256((checkpoint.path / "config.json").read_bytes()).hexdigest()
        }
    }
    stored = {info.file for info in checkpoint.tensors.values() if info.file.name != CONFIG_FILE}
    for path in sorted(stored):
        files[file_label(checkpoint, path)] = {
            "header_sha256": sha256(_header(path)).hexdigest(),
            "bytes": path.stat().st_size,
        }
    source = {"checkpoint": str(checkpoint.path.absolute()), "files": files}
    record = checkpoint.path / RECORD_FILE
    made = read_json(record).get("quantize") if has_file(record) else None
    if isinstance(made, dict) and isinstance(made.get("model_dir"), str):
        source["quantized_from"] = made["model_dir"]
    return source


def file_label(checkpoint: Checkpoint, path: Path) -> str:
    """What a file is called among the others that an engine is made of: by its name, where no file
    of the target has that; a head of a folder of its own is in a model.safetensors, too."""
    is_taken = path.parent != checkpoint.path and (checkpoint.path / path.name).exists()
    return f"draft_model_dir/{path.name}" if is_taken else path.name


def _header(path: Path) -> bytes:
    """What says which tensors a file has: its header, or the pickle in a zip of torch."""
    if path.suffix != SAFE_SUFFIX:
        with ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return b"".join(archive.read(name) for name in pickles)
    with path.open("rb") as file:
        prefix = file.read(8)
        return prefix + file.read(int.from_bytes(prefix, "little"))


def versions() -> dict[str, str]:
    """The versions of Python and of the packages an engine's bytes depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree that was never installed
            found[package] = "unknown"
    return found
