"""Every argument of TensorRT-LLM's executor is either offered here or refused by its name."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest

import llmctl
from llmctl.errors import BadConfig, Unsupported
from llmctl.runtime.api import refused
from llmctl.runtime.api.executor_config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.engine_options import EngineOptions
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import SchedulerConfig

ROOT = Path(llmctl.__file__).parent
# Fields of TensorRT-LLM 0.16 to 0.19 by their names in Python.
UPSTREAM = {
    Request: """input_token_ids max_tokens streaming sampling_config output_config end_id pad_id
        position_ids bad_words stop_words embedding_bias external_draft_tokens_config
        prompt_tuning_config mrope_config lora_config lookahead_config kv_cache_retention_config
        logits_post_processor_name logits_post_processor encoder_input_token_ids
        encoder_input_features encoder_output_length cross_attention_mask skip_cross_attn_blocks
        client_id return_all_generated_tokens priority type context_phase_params
        num_return_sequences guided_decoding_params language_adapter_uid allotted_time_ms
        eagle_config""",
    SamplingConfig: """beam_width top_k top_p top_p_min top_p_reset_ids top_p_decay seed temperature
        min_tokens beam_search_diversity_rate repetition_penalty presence_penalty frequency_penalty
        length_penalty early_stopping no_repeat_ngram_size num_return_sequences min_p
        beam_width_array""",
    OutputConfig: """return_log_probs return_context_logits return_generation_logits
        exclude_input_from_output return_encoder_output return_perf_metrics
        additional_model_outputs""",
    KvCacheConfig: """enable_block_reuse max_tokens max_attention_window sink_token_length
        free_gpu_memory_fraction host_cache_size onboard_blocks cross_kv_cache_fraction
        secondary_offload_min_priority event_buffer_max_size enable_partial_reuse
        copy_on_partial_reuse""",
    SchedulerConfig: """capacity_scheduler_policy context_chunking_policy dynamic_batch_config""",
    ExecutorConfig: """max_beam_width scheduler_config kv_cache_config enable_chunked_context
        normalize_log_probs iter_stats_max_iterations request_stats_max_iterations batching_type
        max_batch_size max_num_tokens parallel_config peft_cache_config
        logits_post_processor_config decoding_config gpu_weights_percent max_queue_size
        extended_runtime_perf_knob_config debug_config recv_poll_period_ms
        max_seq_idle_microseconds spec_dec_config guided_decoding_config additional_output_names
        gather_generation_logits use_variable_beam_width_search enable_trt_overlap""",
}
REQUIRED = {
    Request: {"input_token_ids": (1,), "max_tokens": 1},
    KvCacheConfig: {"num_blocks": 1},
    ExecutorConfig: {"kv_cache": KvCacheConfig(1)},
}
TABLES = {
    Request: refused.REQUEST,
    SamplingConfig: refused.SAMPLING,
    OutputConfig: refused.OUTPUT,
    KvCacheConfig: refused.KV_CACHE,
    SchedulerConfig: refused.SCHEDULER,
    ExecutorConfig: refused.EXECUTOR,
}
NAMES = [(cls, name) for cls, names in UPSTREAM.items() for name in names.split()]


@pytest.mark.parametrize(("cls", "name"), NAMES, ids=[f"{c.__name__}-{n}" for c, n in NAMES])
def test_what_is_not_offered_is_refused_with_its_name_and_value(cls, name):
    if name in {field.name for field in fields(cls)}:
        return
    with pytest.raises(Unsupported, match=rf"{cls.__name__}\({name}='asked'\) is refused: \w+"):
        cls(**REQUIRED.get(cls, {}), **{name: "asked"})
    assert cls(**REQUIRED.get(cls, {}), **{name: None}) == cls(**REQUIRED.get(cls, {}))


@pytest.mark.parametrize("cls", TABLES, ids=lambda cls: cls.__name__)
def test_the_originals_neutral_values_are_taken_and_others_are_not(cls):
    rest = REQUIRED.get(cls, {})
    for name, refusal in TABLES[cls].items():
        for value in refusal.neutral:
            assert cls(**rest, **{name: value}) == cls(**rest)
        with pytest.raises(Unsupported, match=name):
            cls(**rest, **{name: 7})


def test_a_copy_with_a_refused_argument_is_refused_and_one_without_is_checked():
    config = SamplingConfig(top_k=3)
    with pytest.raises(Unsupported, match=r"SamplingConfig\(beam_width=4\)"):
        replace(config, beam_width=4)
    with pytest.raises(BadConfig, match="top_k is -1"):
        replace(config, top_k=-1)
    assert replace(config, seed=1) == SamplingConfig(top_k=3, seed=1)


def test_long_values_are_cut_and_names_of_nobody_are_a_mistake():
    with pytest.raises(Unsupported) as refusal:
        Request((1,), 1, embedding_bias=[0.5] * 128_256)
    assert len(str(refusal.value)) < 200 and "embedding_bias" in str(refusal.value)
    with pytest.raises(BadConfig, match=r"SamplingConfig\(temprature=1.0\)") as mistake:
        SamplingConfig(temprature=1.0)
    assert mistake.value.fix.startswith("the nearest: temperature")


CHECKED = [
    import_module(f"llmctl.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}")
    for path in sorted(ROOT.glob("runtime/**/*.py"))
    if re.search(r"check_(types|values)\(self", path.read_text())
]


@pytest.mark.parametrize("module", CHECKED, ids=lambda module: module.__name__)
def test_no_class_whose_values_are_checked_takes_a_name_of_nobody(module):
    classes = [item for item in vars(module).values() if is_dataclass(item)]
    public = [cls for cls in classes if cls.__module__ == module.__name__]
    public = [cls for cls in public if "__post_init__" in vars(cls)]
    assert public
    for cls in public:
        with pytest.raises(BadConfig, match=rf"{cls.__name__}\(no_such_field=5\): there is no no"):
            cls(no_such_field=5)


def test_options_of_open_that_a_refusal_names_are_there():
    reasons = " ".join(refusal.why for table in TABLES.values() for refusal in table.values())
    named = set(re.findall(r"llmctl\.open\(engine, (\w+)=", reasons)) - {"draft"}
    assert named == {"max_tokens", "free_fraction", "host_memory_bytes", "windows"}
    assert named <= {field.name for field in fields(EngineOptions)}
    assert "runtime." not in reasons, "modules move; what is named is never checked"
