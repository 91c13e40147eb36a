"""What each field of a model's config.json may be: one table of types and ranges.

`build` and `quantize` hold a config against it before they compute with any number of it. null
stands for an absent field, as in transformers. The ranges are far beyond any published model; they
keep a damaged number from being reported as too little disk space or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmctl.errors import CorruptFile, UnknownArchitecture, Unsupported
from llmctl.quantize.strict_json import shown

MAX_LAYERS = 10_000  # each is described and named
MAX_POSITIONS = 1 << 27  # tokens; a rotary table of that length takes tens of GB
MAX_WIDTH = 1 << 24  # of every other size: features, heads, ids
MAX_END_IDS = 256  # each ends an output as a stop word
# What config.json calls the supported families -> model_type. builder/models has a decoder of each;
# transformers has a class of that name, of which `quantize` takes the layers.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may hold, in words and as a test."""

    wanted: str
    accepts: Callable[[Any], bool]


def integer(least: int, most: int) -> Kind:
    """A whole number; true and false, which Python counts as numbers, are none."""
    return Kind(
        f"an integer from {least}, at most {most},",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float, *, above: bool = False) -> Kind:
    """A number in [least, most], or with `above` in (least, most]."""
    return Kind(
        f"a number {'above' if above else 'from'} {least:g}, at most {most:g},",
        lambda value: (
            type(value) in (int, float)
            and (least < value if above else least <= value)
            and value <= most
        ),
    )


def _is_list_of(value: object, kind: type, most: int) -> bool:
    return (
        isinstance(value, list) and len(value) <= most and all(type(item) is kind for item in value)
    )


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NAMES = Kind("a list of names", lambda value: _is_list_of(value, str, 256))
_ID = integer(-1, (1 << 31) - 1)  # -1: models write it for "none"
IDS = Kind(
    f"a token id or a list of at most {MAX_END_IDS}",
    lambda value: (
        _ID.accepts(value)
        or (_is_list_of(value, int, MAX_END_IDS) and all(map(_ID.accepts, value)))
    ),
)
_SIZE = integer(1, MAX_WIDTH)

_TURNS = number(0, 1e6)
ROPE_NUMBERS = {
    "factor": number(1, 1e6),  # one below 1 would shorten what the model was trained on
    "low_freq_factor": _TURNS,
    "high_freq_factor": _TURNS,
    "beta_fast": _TURNS,
    "beta_slow": _TURNS,
    "attention_factor": number(0, 1e3, above=True),
    "mscale": number(0, 1e3),
    "mscale_all_dim": number(0, 1e3),
    "original_max_position_embeddings": number(1, MAX_POSITIONS),
}
_THETA, _PARTIAL = number(1, 1e15, above=True), number(0, 1, above=True)
ROPE_FIELDS = {
    **ROPE_NUMBERS,
    "rope_type": TEXT,
    "type": TEXT,
    "truncate": FLAG,
    "rope_theta": _THETA,
    "partial_rotary_factor": _PARTIAL,
}
SPECIAL_IDS = {"eos_token_id": IDS, "bos_token_id": IDS, "pad_token_id": IDS}
MODEL_FIELDS = {
    **SPECIAL_IDS,
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    "max_position_embeddings": integer(1, MAX_POSITIONS),
    "original_max_position_embeddings": integer(1, MAX_POSITIONS),
    "rms_norm_eps": number(0, 0.5),
    "hidden_act": TEXT,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "is_causal": FLAG,
    "attention_chunk_size": _SIZE,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "sliding_window": integer(0, (1 << 31) - 1),
    "max_window_layers": integer(0, MAX_LAYERS),
    "layer_types": Kind(
        f"a list of {' and '.join(LAYER_TYPES)}",
        lambda value: (
            _is_list_of(value, str, MAX_LAYERS) and all(kind in LAYER_TYPES for kind in value)
        ),
    ),
    "rope_theta": _THETA,
    "partial_rotary_factor": _PARTIAL,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "dtype": TEXT,
    "torch_dtype": TEXT,
}


def check_fields(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> None:
    """Raises CorruptFile for the first field that is there, not null, and not of its kind."""
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and not kind.accepts(value):
            raise CorruptFile(f"{where}: {name} is {shown(value)}; {kind.wanted} is wanted")


def find_architecture(config: Mapping[str, Any], where: str) -> str:
    """The one of `ARCHITECTURES` that config.json names, by `architectures` or, where absent,
    `model_type`. Raises UnknownArchitecture, listing them, and CorruptFile for a `model_type` that
    is no text."""
    found, known = config.get("architectures"), ", ".join(ARCHITECTURES)
    if found is not None and not NAMES.accepts(found):
        raise UnknownArchitecture(
            f"{where}: architectures is {shown(found)}; {NAMES.wanted} is wanted, of {known}",
            fix='correct it, for example to ["LlamaForCausalLM"]',
        )
    check_fields(config, {"model_type": TEXT}, where)
    model_type = config.get("model_type")
    for architecture, its_type in ARCHITECTURES.items():
        if found == [architecture] or (not found and model_type == its_type):
            return architecture
    raise UnknownArchitecture(
        f"{where} names architecture {shown(found or model_type)}; known: {known}",
        fix="use a checkpoint of one of these families",
    )


def check_model_fields(config: Mapping[str, Any], model_type: str, where: str) -> None:
    """Raises CorruptFile for a field of the wrong type or outside its range, for an end id outside
    the vocabulary, and where `model_type` is not that of the architecture."""
    check_fields(config, MODEL_FIELDS, where)
    for name in ("rope_scaling", "rope_parameters"):
        check_fields(config.get(name) or {}, ROPE_FIELDS, f"{where}: {name}")
    if config.get("model_type") not in (None, model_type):
        raise CorruptFile(
            f"{where}: model_type is {shown(config['model_type'])}; the architecture "
            f"{shown(config.get('architectures'))} wants {model_type!r}",
            fix="correct the one of the two that is wrong",
        )
    for name in ("per_layer_config", "kv_sharing_modes"):
        if config.get(name):
            raise Unsupported(
                f"{where}: {name} is {shown(config[name])}; layers that differ in their windows "
                "alone, by layer_types, are supported",
                fix=f"take {name} out of it if the model was trained without",
            )
    _check_attention(config, model_type, where)
    check_end_ids(config, config.get("vocab_size"), where)


def _check_attention(config: Mapping[str, Any], model_type: str, where: str) -> None:
    """Raises Unsupported for attention that no family here has, CorruptFile for windows without a
    size. transformers computes the former, and fails on the latter."""
    if config.get("is_causal") is False or config.get("attention_chunk_size") is not None:
        name = "is_causal" if config.get("is_causal") is False else "attention_chunk_size"
        raise Unsupported(
            f"{where}: {name} is {config[name]}; causal attention is supported, over all earlier "
            "tokens or a sliding window",
            fix=f"take {name} out of it if the model was trained without",
        )
    window, kinds = config.get("sliding_window", 4096), config.get("layer_types")
    if model_type == "llama":  # its prompts would be read without, its outputs generated with one
        window = config.get("sliding_window")
        is_windowed = window is not None if kinds is None else "sliding_attention" in kinds
        if is_windowed and not (window and window >= config.get("max_position_embeddings", 2048)):
            raise Unsupported(
                f"{where}: sliding_window is {window}, layer_types {shown(kinds)}; models of "
                "model_type 'llama' have full attention in every layer",
                fix="set both to null if the model was trained so",
            )
        return
    if model_type != "mistral" and not config.get("use_sliding_window"):
        window = None
    if window == 0 or (window is None and "sliding_attention" in (kinds or ())):
        raise CorruptFile(
            f"{where}: sliding_window is {config.get('sliding_window')}, use_sliding_window "
            f"{config.get('use_sliding_window')}, layer_types {shown(kinds)}; a window of at least "
            "one token is wanted, or full attention in every layer",
            fix="correct the one of them that is wrong",
        )


def check_end_ids(values: Mapping[str, Any], vocab_size: int | None, where: str) -> None:
    """Raises CorruptFile for an end id that no output can hold: nothing would ever end there."""
    check_fields(values, SPECIAL_IDS, where)
    found = values.get("eos_token_id")
    ids: Iterable[int] = found if isinstance(found, list) else () if found is None else (found,)
    outside = [item for item in ids if not 0 <= item < (vocab_size or item + 1)]
    if outside:
        raise CorruptFile(
            f"{where}: eos_token_id holds {outside[0]}; the vocabulary has the ids 0 to "
            f"{(vocab_size or 0) - 1}"
        )
