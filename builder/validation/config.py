"""The fields of an engine's config.json that readers rely on: their types and ranges.

That they are what the plan says is asked in `agreement.py`, once the plan is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmctl.builder.ranks import SUM_LEAVES, engine_file
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.builder.validation.draft_heads import find_wrong_heads
from llmctl.builder.validation.schema import shown
from llmctl.builder.validation.strict_json import MOST
from llmctl.plugins.core.op_spec import FP8, MODEL_DTYPES

MAX_LAYERS = 10_000  # as models/family.py reads of a checkpoint
KV_DTYPES = (*MODEL_DTYPES, FP8, "int8")
_SEED_END = 2**63
_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")

Wanted = tuple[str, Callable[[Any], bool]]  # how it is called, whether a value is that


def _whole(low: int, high: int = MOST) -> Wanted:
    return (
        f"a whole number is wanted, from {low} to {high}",
        lambda v: type(v) is int and low <= v <= high,
    )


def _among(options: tuple[str, ...]) -> Wanted:
    wanted = f"text is wanted: {', '.join(options)}"
    return wanted, lambda v: type(v) is str and v in options


_TEXT: Wanted = ("text", lambda v: type(v) is str)
_TEXT_OR_NONE: Wanted = ("text or null", lambda v: v is None or type(v) is str)
_MODES = tuple(mode.number for mode in SPECULATIVE_MODES.values())
_OBJECT: Wanted = ("an object", lambda v: type(v) is dict)
_REQUIRED: Mapping[str, Wanted] = {
    "command": _TEXT,
    "compute_capability": _TEXT_OR_NONE,
    "pretrained_config.architecture": _TEXT,
    "pretrained_config.dtype": _among(MODEL_DTYPES),
    "pretrained_config.vocab_size": _whole(1),
    "pretrained_config.hidden_size": _whole(1),
    "pretrained_config.intermediate_size": _whole(1),
    "pretrained_config.num_hidden_layers": _whole(1, MAX_LAYERS),
    "pretrained_config.quantization": _OBJECT,
    "pretrained_config.quantization.quant_algo": _TEXT_OR_NONE,
    "pretrained_config.quantization.kv_cache_quant_algo": _TEXT_OR_NONE,
    "build_config.max_batch_size": _whole(1),
    "build_config.max_seq_len": _whole(1),
    "build_config.max_num_tokens": _whole(1),
    "build_config.max_draft_len": _whole(0),
    "build_config.speculative_decoding_mode": (
        f"one of {_MODES} is wanted",
        lambda v: type(v) is int and v in _MODES,
    ),
    "build_config.tokens_per_block": _whole(1),
    "build_config.kv_cache_dtype": _among(KV_DTYPES),
    "tokenizer.hash": _TEXT_OR_NONE,
    "weights.load_format": _among(("auto", "dummy", "planted")),
}
_OPTIONAL: Mapping[str, Wanted] = {  # where they are given
    "tokenizer.sha256": _TEXT_OR_NONE,
    "tokenizer.vocab_size": (
        "a whole number or null",
        lambda v: v is None or (type(v) is int and 0 <= v <= MOST),
    ),
    "build_config.tp_size": _whole(1, 1024),
    "build_config.sum_leaves": (
        f"1 or {SUM_LEAVES} is wanted",
        lambda v: type(v) is int and v in (1, SUM_LEAVES),
    ),
    "build_config.kv_cache_type": _among(("PAGED", "CONTINUOUS")),
}


def find_wrong_field(raw: Mapping[str, Any]) -> str | None:
    """Which field of config.json is not what readers rely on, and how; None: none."""
    for name, wanted in _REQUIRED.items():
        *outer, last = name.split(".")
        holder: Any = raw
        for key in outer:
            holder = holder[key]
        if last not in holder or not wanted[1](holder[last]):
            return _named(name, holder.get(last, ...), wanted[0])
    for name, wanted in _OPTIONAL.items():
        outer_name, last = name.split(".")
        holder = raw[outer_name]
        if last in holder and not wanted[1](holder[last]):
            return _named(name, holder[last], wanted[0])
    wrong_heads = find_wrong_heads(raw["build_config"])
    wrong_ids = _wrong_ids(raw["pretrained_config"])
    return wrong_ids or _wrong_recipe(raw) or wrong_heads or _wrong_files(raw)


def _named(name: str, found: Any, wanted: str) -> str:
    text = "missing" if found is ... else shown(found)
    return f"{name} is {text}; {wanted}{'' if ' is wanted' in wanted else ' is wanted'}"


def _wrong_files(raw: Mapping[str, Any]) -> str | None:
    """A file for each rank, all with one header: one plan, and tensors of the same sizes."""
    files, count = raw["files"], raw["build_config"].get("tp_size", 1)
    wanted = [engine_file(rank) for rank in range(count)]
    if sorted(files) != sorted(wanted):
        names = f"{wanted[0]} to {wanted[-1]}" if count > 1 else wanted[0]
        return f"files lists {shown(sorted(files))}; {names} is wanted, a file for each rank"
    first = files[wanted[0]]
    for name in wanted:
        record = files[name]
        if type(record) is not dict or record.keys() != {"bytes", "header_sha256"}:
            return _named(f"files.{name}", record, "bytes and header_sha256")
        if record != first:
            return f"files.{name} is not as files.{wanted[0]}; all ranks have one plan"
    return None


def _wrong_ids(pretrained: Mapping[str, Any]) -> str | None:
    """Special ids: one, several or null; -1 is how some models say null. An end id that no output
    can hold would end nothing; the others may lie behind the vocabulary, as some models' do."""
    for name in _IDS:
        value = pretrained.get(name)
        for one in value if type(value) is list else [value]:
            if one is not None and (type(one) is not int or not -1 <= one <= MOST):
                return _named(f"pretrained_config.{name}", value, "ids, an id or null")
            if name == "eos_token_id" and one is not None and one >= pretrained["vocab_size"]:
                wanted = f"ids of the vocabulary, 0 to {pretrained['vocab_size'] - 1},"
                return _named(f"pretrained_config.{name}", value, wanted)
    return None


def _wrong_recipe(raw: Mapping[str, Any]) -> str | None:
    """What generated weights are made from."""
    recipe = raw["weights"]
    if recipe["load_format"] == "auto":
        return None
    seed = recipe.get("seed", ...)
    if type(seed) is not int or not 0 <= seed < _SEED_END:
        return _named("weights.seed", seed, "a whole number of 63 bits")
    if recipe["load_format"] == "dummy":
        return None
    if recipe.get("role") not in ("target", "draft"):
        return _named("weights.role", recipe.get("role", ...), "target or draft")
    share = recipe.get("acceptance", ...)
    if type(share) not in (int, float) or not 0 <= share <= 1:
        return _named("weights.acceptance", share, "a number from 0 to 1")
    ids, vocab = recipe.get("ordinary_tokens", ...), raw["pretrained_config"]["vocab_size"]
    is_pair = type(ids) is list and len(ids) == 2 and all(type(i) is int for i in ids)
    if not is_pair or not 0 <= ids[0] < ids[1] <= vocab:
        return _named("weights.ordinary_tokens", ids, "a range of ids of the vocabulary")
    return None
