"""Is config.json what the plan implies, and the plan what config.json says?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llmctl.builder.plan import Plan, PlanTensor
from llmctl.builder.ranks import local_kv_heads
from llmctl.builder.speculative_modes import SPECULATIVE_MODES, mode_of
from llmctl.builder.validation.errors import wrong
from llmctl.builder.validation.strict_json import MOST
from llmctl.plugins.backends.backend import Backend
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.ops.paged_attention.fp8_context import (
    GENERATION,
    OPTION,
    Fp8Tokens,
    fp8_tokens,
)

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig

_Pair = tuple[str, Any, Any]  # what it is, as config.json has it, as the plan has it
_KV_ALGOS = {FP8: "FP8", "int8": "INT8"}
_EMBEDDINGS = ("embedding", "embedding_norm")
_WRITES = ("rope_kv_write", "packed_linear_rope_kv")
_MOST_SCORES = 2**62
_ON, _OFF = "enable", "disable"  # of a plugin option


def check_agreement(
    config: EngineConfig, plan: Plan, tensors: Mapping[str, PlanTensor], backend: Backend
) -> None:
    """Raises CorruptEngine."""
    try:
        _check_cache(plan, config, backend)
        for name, said, found in (
            *_cache(config, plan),
            *_model(config, plan, tensors),
            *_limits(config.build_config, plan),
        ):
            if type(said) is not type(found) or said != found:
                raise wrong(f"config.json says {name} is {said!r}, and the plan has {found!r}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise wrong(f"config.json lacks what describes the plan: {error!r}") from error
    _check_generated(config, plan, backend)


def _limits(build: Mapping[str, Any], plan: Plan) -> Iterator[_Pair]:
    rows = build["max_batch_size"] * (build["max_draft_len"] + 1)
    yield "max_num_tokens", build["max_num_tokens"], plan.max_num_tokens
    yield "max_batch_size * (max_draft_len + 1)", rows, plan.max_num_rows
    if plan.max_num_requests:
        yield "max_batch_size", build["max_batch_size"], plan.max_num_requests
    beams = build["max_batch_size"] * build.get("draft_heads", {}).get("num_beams", 0)
    yield "max_batch_size * num_beams", beams, plan.max_num_beams
    yield "max_input_len", build["max_input_len"], build["max_seq_len"]
    mode = mode_of(build["speculative_decoding_mode"])
    has_drafts = mode is not SPECULATIVE_MODES["none"]
    yield "speculative_decoding_mode with drafts", has_drafts, build["max_draft_len"] > 0
    if plan.fp8_tokens is Fp8Tokens.ALL:
        yield "speculative_decoding_mode with trees", mode.drafts_trees, False
    yield "max_beam_width", build["max_beam_width"], 1
    yield "gather_context_logits", build["gather_context_logits"], False


def _cache(config: EngineConfig, plan: Plan) -> Iterator[_Pair]:
    build, model, cache = config.build_config, config.pretrained_config, plan.kv_cache
    ranks = build["tp_size"]
    block = cache.tokens_per_block
    yield "num_hidden_layers", model["num_hidden_layers"], cache.num_layers
    kv_heads = model["num_key_value_heads"]
    yield "num_key_value_heads", local_kv_heads(kv_heads, ranks), cache.num_kv_heads
    yield "head_size", model["head_size"], cache.head_size
    yield "tokens_per_block", build["tokens_per_block"], block
    yield "kv_cache_dtype", build["kv_cache_dtype"], cache.dtype
    yield (
        "kv_cache_quant_algo",
        model["quantization"]["kv_cache_quant_algo"],
        _KV_ALGOS.get(cache.dtype),
    )
    yield "attention_windows", model["attention_windows"], list(cache.windows)
    yield "the number of windows", len(cache.windows), cache.num_layers


def _model(config: EngineConfig, plan: Plan, tensors: Mapping[str, PlanTensor]) -> Iterator[_Pair]:
    """What operators and their weights have of the model."""
    model, build = config.pretrained_config, config.build_config
    cache, ranks, length = plan.kv_cache, build["tp_size"], build["max_seq_len"]
    logits = tensors[plan.outputs["logits"]]
    tied = model["tie_word_embeddings"]
    yield "tie_word_embeddings", tied, bool(tied)
    yield "the logits", ["rows", model["vocab_size"], "float32"], [*logits.shape, logits.dtype]
    heads = {
        "num_heads": model["num_attention_heads"] // ranks,
        "num_kv_heads": cache.num_kv_heads,
        "head_size": cache.head_size,
    }
    epsilon = float(model["norm_epsilon"])
    scale = float(cache.head_size) ** -0.5
    seen: set[tuple[Any, ...]] = set()
    for op in plan.ops:
        attributes = op.attributes
        if "epsilon" in attributes:
            found = attributes["epsilon"]
            if op.op not in ("rope_kv_write",) or "q_norm" in op.inputs:
                yield f"norm_epsilon of {op.name}", epsilon, found
        if op.op in _EMBEDDINGS:
            shape = [model["vocab_size"], model["hidden_size"]]
            yield f"the embedding of {op.name}", shape, list(tensors[op.inputs["weight"]].shape)
        if "layer" in attributes:
            for name, value in heads.items():
                yield f"{name} of {op.name}", value, attributes[name]
        if op.op in _WRITES:
            rotary = tensors[op.inputs["rotary"]]
            if (op.inputs["rotary"],) not in seen:
                seen.add((op.inputs["rotary"],))
                yield "max_seq_len", [length, cache.head_size], list(rotary.shape)
                yield "rotary tables", 1, len(seen)
        if op.op == "paged_attention":
            yield f"softmax_scale of {op.name}", scale, attributes["softmax_scale"]
            yield f"sink_tokens of {op.name}", 0, attributes.get("sink_tokens", 0)
            layer = int(attributes["layer"])
            window = cache.windows[layer] if 0 <= layer < cache.num_layers else None
            yield f"window of {op.name}", window, attributes["window"]
            products = fp8_tokens(attributes)
            if products is not Fp8Tokens.NONE:
                yield f"{OPTION} of {op.name}", config.plugin_config[OPTION], _ON
                yield f"the cache of {op.name}, which has FP8 products,", cache.dtype, FP8
            # All layers or none, as the runtime asks once. Older engines do not have the option.
            said = config.plugin_config.get(GENERATION, _OFF)
            yield f"{GENERATION} of {op.name}", said, _ON if products is Fp8Tokens.ALL else _OFF
        if op.op == "packed_linear_swiglu":
            yield f"dtype of {op.name}", model["dtype"], attributes["dtype"]


def _check_cache(plan: Plan, config: EngineConfig, backend: Backend) -> None:
    cache, build = plan.kv_cache, config.build_config
    dtype, length = config.pretrained_config["dtype"], build["max_seq_len"]
    block, is_paged = cache.tokens_per_block, build["kv_cache_type"] == "PAGED"
    if not (is_paged and 8 <= block <= 128 and block & (block - 1) == 0) and (
        is_paged or block != length
    ):
        wanted = "a power of two from 8 to 128" if is_paged else f"max_seq_len, {length}"
        raise wrong(f"tokens_per_block is {block}; {wanted} is wanted")
    if build["kv_cache_type"].lower() not in backend.cache_types:
        raise wrong(f"kv_cache_type is {build['kv_cache_type']!r} on backend {backend.name!r}")
    quantized = {FP8: "fp8", "int8": "int8"}.get(cache.dtype)
    if cache.dtype != dtype and quantized not in backend.quantized_kv_cache:
        raise wrong(f"the KV cache is {cache.dtype} for a model in {dtype}")
    if any(not 0 <= window < length for window in cache.windows):
        raise wrong(f"the KV cache has windows {cache.windows} for {length} tokens")
    has_scales = any("k_scale" in op.inputs for op in plan.ops)
    if has_scales and quantized is None:
        raise wrong(f"the KV cache is {cache.dtype} and has scales")
    heads = config.pretrained_config["num_attention_heads"] * cache.head_size
    if not 1 <= heads <= MOST or plan.max_num_tokens * length * heads > _MOST_SCORES:
        raise wrong(f"attention of {heads} columns over {length} tokens leaves 64 bits")


def _check_generated(config: EngineConfig, plan: Plan, backend: Backend) -> None:
    """All weights are stored but rotary tables, or none is and they are made as config.json
    says."""
    name = config.weights["load_format"]
    if name != "auto" and name not in backend.generated_weights:
        raise wrong(f"weights are {name}, which backend {backend.name!r} does not make")
    for tensor in plan.tensors:
        if tensor.kind == "weight" and tensor.is_stored != (
            name == "auto" and tensor.name not in plan.rotary
        ):
            state = "stored" if tensor.is_stored else "not stored"
            raise wrong(f"weight {tensor.name!r} is {state}, and load_format is {name!r}")
