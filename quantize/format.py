"""The quantized checkpoint: its files, its two config documents, and the names of what is written.

The layout is ModelOpt's "unified Hugging Face" one: the source's config.json with a
`quantization_config` added (flat), hf_quant_config.json beside it (nested), safetensors with the
source's tensor names plus scales. All scales are dequantization multipliers: real = stored * scale.
`builder` reads quantized checkpoints, those of other exporters included (`found.py`), through this
module and `checkpoint.py`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from llmctl.errors import CorruptFile, Unsupported
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.plugins.schemes.table import quantized_schemes
from llmctl.quantize.config_fields import ARCHITECTURES as ARCHITECTURES
from llmctl.quantize.config_fields import FLAG as FLAG
from llmctl.quantize.config_fields import MAX_POSITIONS as MAX_POSITIONS
from llmctl.quantize.config_fields import MODEL_FIELDS as MODEL_FIELDS
from llmctl.quantize.config_fields import ROPE_FIELDS as ROPE_FIELDS
from llmctl.quantize.config_fields import ROPE_NUMBERS as ROPE_NUMBERS
from llmctl.quantize.config_fields import TEXT as TEXT
from llmctl.quantize.config_fields import Kind as Kind
from llmctl.quantize.config_fields import check_end_ids as check_end_ids
from llmctl.quantize.config_fields import check_fields as check_fields
from llmctl.quantize.config_fields import check_model_fields as check_model_fields
from llmctl.quantize.config_fields import find_architecture as find_architecture
from llmctl.quantize.config_fields import integer as integer
from llmctl.quantize.files import has_file as has_file
from llmctl.quantize.files import not_a_file as not_a_file
from llmctl.quantize.files import why_no_file as why_no_file
from llmctl.quantize.found import QuantizationInfo as QuantizationInfo
from llmctl.quantize.found import read_quantization as read_quantization
from llmctl.quantize.schemes.table import WRITERS
from llmctl.quantize.strict_json import clipped as clipped
from llmctl.quantize.strict_json import load_strict as load_strict
from llmctl.quantize.strict_json import shown as shown
from llmctl.quantize.tied import is_tied as is_tied

CONFIG_FILE = "config.json"
QUANT_CONFIG_FILE = "hf_quant_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# What a tokenizer may consist of. Ids and texts come of tokenizer.json and of the single tokens
# that cli/added_tokens.py finds in others.
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
RECORD_FILE = "llmctl_quantize.json"  # how the checkpoint was made; other readers ignore it
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


def read_stated_quantization(folder: Path, config: dict[str, Any]) -> QuantizationInfo | None:
    """What config.json of a folder, which is `config`, or hf_quant_config.json beside it says of
    its weights; None: nothing. Raises CorruptFile or UnknownQuantization."""
    nested = folder / QUANT_CONFIG_FILE
    stated = read_json(nested) if has_file(nested) else None
    return read_quantization(config, stated, str(folder / CONFIG_FILE))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object strictly; `where` names its origin in errors. Raises CorruptFile."""
    try:
        value = load_strict(data)
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors
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


NOT_WRITTEN = ("int8_sq", "int4_awq")  # --qformats of TensorRT-LLM that are known by name alone
# --kv_cache_dtype -> kv_cache_quant_algo
KV_CACHE_DTYPES: dict[str, str | None] = {"fp8": "FP8", "int8": "INT8", "none": None}


def find_scheme(qformat: str) -> QuantizedScheme:
    """The scheme of a `--qformat`. Raises Unsupported, listing those that work."""
    schemes = {scheme.qformat: scheme for scheme in quantized_schemes()}
    if qformat not in schemes:
        why = (
            "is not written by this version" if qformat in NOT_WRITTEN else "is not a known format"
        )
        raise Unsupported(
            f"--qformat {qformat} {why}; available: {', '.join(schemes)}", fix="--qformat fp8"
        )
    return schemes[qformat]


def quantization_documents(
    scheme: QuantizedScheme, kv_cache_algo: str | None, exclude: list[str], producer_version: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(hf_quant_config.json, config.json's quantization_config), as ModelOpt 0.47 writes them."""
    producer = {"name": "modelopt", "version": producer_version}
    quantization: dict[str, Any] = {
        "quant_algo": scheme.algo,
        "kv_cache_quant_algo": kv_cache_algo,
    }
    if scheme.storage.block is not None:
        quantization["group_size"] = scheme.storage.block
    nested = {"producer": producer, "quantization": quantization | {"exclude_modules": exclude}}
    number = {"dynamic": False, "num_bits": 8, "type": "float"}
    flat: dict[str, Any] = {}
    group = WRITERS[scheme.name].config_group
    if group is not None:
        flat["config_groups"] = {"group_0": copy.deepcopy(group)}
    flat |= {"ignore": exclude, "quant_algo": scheme.algo}
    if kv_cache_algo:
        flat["kv_cache_scheme"] = dict(number, type="float" if kv_cache_algo == "FP8" else "int")
    return nested, flat | {"producer": producer, "quant_method": "modelopt"}
