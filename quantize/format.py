"""The quantized checkpoint: its files, its two config documents, and the schemes llmctl writes.

The layout is ModelOpt's "unified Hugging Face" one: the source's config.json with a
`quantization_config` added (flat), hf_quant_config.json beside it (nested), safetensors with the
source's tensor names plus scales. All scales are dequantization multipliers: real = stored * scale.
`builder` reads quantized checkpoints, those of other exporters included, through this module and
`checkpoint.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from re import compile as compile_regex
from re import error as RegexError
from typing import Any

from llmctl.errors import CorruptFile, UnknownQuantization, Unsupported

CONFIG_FILE = "config.json"
QUANT_CONFIG_FILE = "hf_quant_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# What a tokenizer may consist of; `tokenizer.json` alone is what llmctl itself reads.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION_CONFIG_FILE = "generation_config.json"

INT8_MAX = 127.0  # largest value of a symmetric int8
FP8_MAX = 448.0  # largest finite float8_e4m3fn (OCP FP8 specification, table 1)
MAX_JSON_BYTES = 64 << 20  # an index of a 1 T-parameter model is about 20 MB


# ---- strict JSON ----


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object strictly: no NaN or Infinity, no repeated keys, at most 64 MiB.

    Raises CorruptFile; a missing file is the caller's to name and raises FileNotFoundError.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CorruptFile(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read as JSON")
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object strictly; `where` names its origin in errors. Raises CorruptFile."""

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def refuse_infinite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"the number {text} does not fit a double")
        return value

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            names = [key for key, _ in pairs]
            repeated = next(key for key in names if names.count(key) > 1)
            raise ValueError(f"the key {repeated!r} occurs twice")
        return unique

    try:
        value = json.loads(
            data,
            parse_constant=refuse_constant,
            parse_float=refuse_infinite,
            object_pairs_hook=refuse_repeats,
        )
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise CorruptFile(
            f"{where} is not valid JSON: {error}",
            fix="fetch the file again",
        ) from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{where} holds a JSON {type(value).__name__}; an object is wanted")
    return value


def dump_json(value: dict[str, Any]) -> str:
    """JSON text as ModelOpt and transformers lay it out: indented, NaN refused."""
    return json.dumps(value, indent=4, allow_nan=False, ensure_ascii=False) + "\n"


# ---- schemes llmctl writes ----


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of `--qformat`. `is_ready` is False for rows that keep a place in the table."""

    qformat: str
    quant_algo: str
    weights: str
    activations: str
    is_ready: bool


SCHEMES = {
    scheme.qformat: scheme
    for scheme in (
        Scheme("fp8", "FP8", "float8_e4m3fn per tensor", "float8_e4m3fn static", True),
        Scheme("int8_sq", "W8A8_SQ_PER_CHANNEL", "int8 per channel", "int8 static", False),
        Scheme("int4_awq", "W4A16_AWQ", "int4 in groups of 128", "as the model", False),
    )
}
# --kv_cache_dtype -> kv_cache_quant_algo
KV_CACHE_DTYPES: dict[str, str | None] = {"fp8": "FP8", "int8": "INT8", "none": None}


def find_scheme(qformat: str) -> Scheme:
    """The scheme of a `--qformat`. Raises Unsupported, listing those that work."""
    scheme = SCHEMES.get(qformat)
    if scheme is None or not scheme.is_ready:
        ready = ", ".join(row.qformat for row in SCHEMES.values() if row.is_ready)
        why = "is not written by this version" if scheme else "is not a known format"
        raise Unsupported(f"--qformat {qformat} {why}; available: {ready}", fix="--qformat fp8")
    return scheme


def quantization_documents(
    scheme: Scheme, kv_cache_algo: str | None, exclude: list[str], producer_version: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(hf_quant_config.json, config.json's quantization_config), as ModelOpt 0.47 writes them."""
    producer = {"name": "modelopt", "version": producer_version}
    nested = {
        "producer": producer,
        "quantization": {
            "quant_algo": scheme.quant_algo,
            "kv_cache_quant_algo": kv_cache_algo,
            "exclude_modules": exclude,
        },
    }
    number = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": dict(number), "weights": dict(number), "targets": ["Linear"]}
    flat: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": exclude,
        "quant_algo": scheme.quant_algo,
    }
    if kv_cache_algo:
        flat["kv_cache_scheme"] = dict(number, type="float" if kv_cache_algo == "FP8" else "int")
    return nested, flat | {"producer": producer, "quant_method": "modelopt"}


# ---- quantized checkpoints as found ----


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """What a checkpoint says about its own quantization, whoever wrote it.

    method: "modelopt", "compressed-tensors" or "fp8". algo uses ModelOpt's vocabulary:
    "FP8" (one weight scale a tensor), "FP8_PER_CHANNEL_PER_TOKEN" (one a row),
    "FP8_BLOCK_SCALES" (one a 128x128 block), None when only the KV cache is quantized, or the
    name as found when it is none of these. weight_strategy is "tensor", "channel", "block",
    "group" or None; activations "static", "dynamic" or None. exclude holds module names,
    wildcards (ModelOpt) or `re:` patterns (compressed-tensors).
    """

    method: str
    algo: str | None
    kv_cache_algo: str | None
    exclude: tuple[str, ...]
    weight_strategy: str | None
    activations: str | None

    def excludes(self, module: str) -> bool:
        """Whether `module` ("model.layers.0.mlp.up_proj") is stored unquantized by name."""
        return any(_matches(pattern, module) for pattern in self.exclude)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return compile_regex(pattern[3:]).match(module) is not None
        except RegexError as error:
            raise UnknownQuantization(
                f"the exclusion {pattern!r} is not a regular expression: {error}"
            ) from error
    return fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def read_quantization(
    config: dict[str, Any], nested: dict[str, Any] | None, where: str
) -> QuantizationInfo | None:
    """The quantization of a checkpoint, None for a plain one.

    config: config.json. nested: hf_quant_config.json or None; it speaks when config.json is
    silent (ModelOpt before 0.31). Raises UnknownQuantization for a method llmctl does not read.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None and nested is not None:
        return _modelopt(nested.get("quantization", nested), where)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise UnknownQuantization(f"{where}: quantization_config is not an object")
    method = str(found.get("quant_method", "")).lower()
    if not method and "config_groups" in found:
        method = "compressed-tensors"
    reader = {
        "modelopt": _modelopt,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
    }.get(method)
    if reader is None:
        raise UnknownQuantization(
            f"{where}: quant_method is {method or 'absent'!r}; "
            "llmctl reads modelopt, compressed-tensors and fp8",
            fix="start from the unquantized checkpoint and run `llmctl quantize`",
        )
    return reader(found, where)


_MODELOPT_ALGOS: dict[str, tuple[str, str, str | None]] = {
    # found (upper case) -> algo, weight strategy, activations
    "FP8": ("FP8", "tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8_PER_CHANNEL_PER_TOKEN", "channel", "dynamic"),
    "FP8_PB_WO": ("FP8_BLOCK_SCALES", "block", None),
    "FP8_BLOCK_SCALES": ("FP8_BLOCK_SCALES", "block", "dynamic"),
}


def _modelopt(found: dict[str, Any], where: str) -> QuantizationInfo:
    name = found.get("quant_algo")
    algo, strategy, activations = _MODELOPT_ALGOS.get(str(name).upper(), (name, None, None))
    kv_cache = found.get("kv_cache_quant_algo")
    if kv_cache is None:
        kv_cache = _kv_cache_algo(found.get("kv_cache_scheme"))
    exclude = found.get("exclude_modules") or found.get("ignore")
    return QuantizationInfo(
        "modelopt", algo, kv_cache, _strings(exclude, where), strategy, activations
    )


def _compressed_tensors(found: dict[str, Any], where: str) -> QuantizationInfo:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        count = len(groups) if isinstance(groups, dict) else 0
        raise UnknownQuantization(
            f"{where}: compressed-tensors with {count} config_groups; exactly one is read"
        )
    (group,) = groups.values()
    weights = _object(group, "weights", where)
    inputs = _object(group, "input_activations", where)
    strategy = weights.get("strategy")
    is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
    algos = {
        "tensor": "FP8",
        "channel": "FP8_PER_CHANNEL_PER_TOKEN",
        "block": "FP8_BLOCK_SCALES",
    }
    algo = algos.get(str(strategy)) if is_fp8 else None
    if algo is None:
        algo = f"{weights.get('type')}{weights.get('num_bits')}-{strategy}"
    activations = None if not inputs else "dynamic" if inputs.get("dynamic") else "static"
    return QuantizationInfo(
        "compressed-tensors",
        algo,
        _kv_cache_algo(found.get("kv_cache_scheme")),
        _strings(found.get("ignore"), where),
        strategy,
        activations,
    )


def _fp8(found: dict[str, Any], where: str) -> QuantizationInfo:
    is_block = found.get("weight_block_size") is not None
    if is_block and found["weight_block_size"] != [128, 128]:
        raise UnknownQuantization(
            f"{where}: weight_block_size is {found['weight_block_size']}; [128, 128] is read"
        )
    exclude = found.get("modules_to_not_convert") or found.get("ignored_layers")
    return QuantizationInfo(
        "fp8",
        "FP8_BLOCK_SCALES" if is_block else "FP8",
        None,
        _strings(exclude, where),
        "block" if is_block else "tensor",
        str(found.get("activation_scheme", "dynamic")),
    )


def _kv_cache_algo(scheme: Any) -> str | None:
    """`kv_cache_scheme` is absent, a name, or compressed-tensors arguments."""
    if not isinstance(scheme, dict):
        return str(scheme) if scheme else None
    name = f"{scheme.get('type')}{scheme.get('num_bits')}"
    return {"float8": "FP8", "int8": "INT8"}.get(name, name)


def _object(parent: Any, key: str, where: str) -> dict[str, Any]:
    value = parent.get(key) if isinstance(parent, dict) else None
    if value is not None and not isinstance(value, dict):
        raise UnknownQuantization(f"{where}: {key} of a config group is not an object")
    return value or {}


def _strings(value: Any, where: str) -> tuple[str, ...]:
    values = value or []
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise UnknownQuantization(f"{where}: the excluded modules are not a list of names")
    return tuple(values)
