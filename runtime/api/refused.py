"""Arguments of TensorRT-LLM's executor that are not supported here, and why; names of nobody.

They are refused with an error, so that a program written for that executor does not lose a feature
silently. Values that ask for nothing (None, and TensorRT-LLM's neutral values) are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from llmctl.errors import BadConfig, Unsupported

Class = TypeVar("Class", bound=type)


class Refusal(NamedTuple):
    """Why a name is refused, and values of it that ask for nothing."""

    why: str
    neutral: tuple[object, ...] = ()


_BEAM = "beam search is not available; every sequence runs with one beam"
_LORA = "LoRA adapters are not available; merge the adapter into the checkpoint before quantizing"
_DRAFTS = "an executor has one draft method: llmctl.open(engine, draft=...); a request has none"
_LOGITS = "whole logits are not kept; return_log_probs gives those of the emitted tokens"
_PROCESSOR = "logits are not handed out: they stay on the device that samples from them"
_ENCODER = "encoder-decoder models are not available"
_TOKENS = "prompts are tokens; prompt tuning and multimodal inputs are not available"
_PHASES = "prefill and generation run in one executor"
_TOP_P = "top_p stays the same for the whole of a sequence"
_GUIDED = "guided decoding is not available"
_RANKS = "the executor runs in rank 0, and the engine says how many ranks there are"
_PLANNED = "num_blocks says how many there are; llmctl.open(engine, {}=...) finds that number"
_WINDOW = "llmctl.open(engine, windows=WindowOptions(...)) narrows the windows of all its layers"

REQUEST = {
    "pad_id": Refusal("steps are packed, so there is no padding"),
    "position_ids": Refusal("positions are those of the tokens in their sequence"),
    "mrope_config": Refusal(_TOKENS),
    "multimodal_input": Refusal(_TOKENS),
    "multimodal_embedding": Refusal(_TOKENS),
    "prompt_tuning_config": Refusal(_TOKENS),
    "embedding_bias": Refusal("a bias on logits is not available; bad_words bans tokens"),
    "external_draft_tokens_config": Refusal(_DRAFTS),
    "eagle_config": Refusal(_DRAFTS),
    "lora_config": Refusal(_LORA),
    "logits_post_processor_name": Refusal(_PROCESSOR),
    "logits_post_processor": Refusal(_PROCESSOR),
    "encoder_input_token_ids": Refusal(_ENCODER),
    "encoder_input_features": Refusal(_ENCODER),
    "encoder_output_length": Refusal(_ENCODER),
    "cross_attention_mask": Refusal(_ENCODER),
    "skip_cross_attn_blocks": Refusal(_ENCODER),
    "type": Refusal(_PHASES),
    "request_type": Refusal(_PHASES),
    "context_phase_params": Refusal(_PHASES),
    "guided_decoding_params": Refusal(_GUIDED),
    "language_adapter_uid": Refusal("language adapters are not available"),
    "num_return_sequences": Refusal("it is a field of SamplingConfig"),
    "return_all_generated_tokens": Refusal("it is a field of OutputConfig"),
    "max_new_tokens": Refusal("it is called max_tokens"),
}
SAMPLING = {
    "beam_width": Refusal(_BEAM, (1,)),
    "beam_width_array": Refusal(_BEAM),
    "beam_search_diversity_rate": Refusal(_BEAM, (0,)),
    "length_penalty": Refusal(_BEAM, (0,)),
    "early_stopping": Refusal(_BEAM, (1,)),
    "top_p_min": Refusal(_TOP_P),
    "top_p_decay": Refusal(_TOP_P, (1,)),
    "top_p_reset_ids": Refusal(_TOP_P),
    "random_seed": Refusal("it is called seed"),
    "min_length": Refusal("it is called min_tokens"),
}
OUTPUT = {
    "return_context_logits": Refusal(_LOGITS, (False,)),
    "return_generation_logits": Refusal(_LOGITS, (False,)),
    "return_encoder_output": Refusal(_ENCODER, (False,)),
    "additional_model_outputs": Refusal("engines have one output, the logits"),
}
KV_CACHE = {
    "max_tokens": Refusal(_PLANNED.format("max_tokens")),
    "free_gpu_memory_fraction": Refusal(_PLANNED.format("free_fraction")),
    "max_attention_window": Refusal(_WINDOW),
    "max_attention_window_vec": Refusal(_WINDOW),
    "sink_token_length": Refusal(_WINDOW),
    "host_cache_size": Refusal("llmctl.open(engine, host_memory_bytes=...) finds num_host_blocks"),
    "onboard_blocks": Refusal("blocks always come back before they are used", (True,)),
    "copy_on_partial_reuse": Refusal("a partly matching block is always copied", (True,)),
    "cross_kv_cache_fraction": Refusal(_ENCODER),
}
SCHEDULER = {
    "dynamic_batch_config": Refusal("ExecutorConfig.max_step_ms tunes the tokens of a step"),
}
EXECUTOR = {
    "max_beam_width": Refusal(_BEAM, (1,)),
    "use_variable_beam_width_search": Refusal(_BEAM, (False,)),
    "scheduler_config": Refusal("it is called scheduler"),
    "kv_cache_config": Refusal("it is called kv_cache"),
    "enable_chunked_context": Refusal("it is a field of SchedulerConfig"),
    "batching_type": Refusal("SchedulerConfig has STATIC_BATCH as a policy"),
    "normalize_log_probs": Refusal("log-probs are those of the logits, normalized", (True,)),
    "parallel_config": Refusal(_RANKS),
    "peft_cache_config": Refusal(_LORA),
    "logits_post_processor_config": Refusal(_PROCESSOR),
    "decoding_config": Refusal(_DRAFTS),
    "spec_dec_config": Refusal(_DRAFTS),
    "guided_decoding_config": Refusal(_GUIDED),
    "gpu_weights_percent": Refusal("weights are on the device as a whole", (1,)),
    "extended_runtime_perf_knob_config": Refusal("kernels are chosen when an engine is built"),
    "debug_config": Refusal("there are no debug tensors"),
    "recv_poll_period_ms": Refusal(_RANKS, (0,)),
    "max_seq_idle_microseconds": Refusal("no sequence idles; allotted_time_ms ends a request"),
    "additional_output_names": Refusal("engines have one output, the logits"),
    "gather_generation_logits": Refusal(_LOGITS, (False,)),
    "enable_trt_overlap": Refusal("the host always works beside the device", (False,)),
}


def refuses(refusals: Mapping[str, Refusal] = MappingProxyType({})) -> Callable[[Class], Class]:
    """Make a dataclass raise Unsupported for these keyword arguments, and BadConfig for others that
    are no fields of it, where Python would raise a TypeError."""

    def decorate(cls: Class) -> Class:
        made: Any = cls
        own = frozenset(field.name for field in fields(made) if field.init)
        assert not refusals.keys() & own, "offered and refused"
        initialize = made.__init__

        @wraps(initialize)
        def checked(self: object, *args: Any, **kwargs: Any) -> None:
            if not own.issuperset(kwargs):
                for name in [name for name in kwargs if name in refusals]:
                    value, (why, neutral) = kwargs.pop(name), refusals[name]
                    if value is not None and not any(value is n or value == n for n in neutral):
                        raise Unsupported(
                            f"{cls.__name__}({name}={_short(value)}) is refused: {why}"
                        )
                require_known(cls.__name__, kwargs, own)
            initialize(self, *args, **kwargs)

        made.__init__ = checked
        return cls

    return decorate


def require_known(call: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise BadConfig for the first keyword argument of a call that it does not know."""
    from difflib import get_close_matches  # every --help imports this file

    for name, value in given.items():
        if name not in known:
            nearest = get_close_matches(name, sorted(known), n=3, cutoff=0.5)
            named = f"the nearest: {', '.join(nearest)}" if nearest else ""
            raise BadConfig(
                f"{call}({name}={_short(value)}): there is no {name}",
                fix=named or f"there are {', '.join(sorted(known))}",
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
