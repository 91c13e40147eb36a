"""Limits and plugin options: each has its effect or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from llmctl.builder.backends import (
    choose_backend,
    choose_capability,
    require_cache_type,
    require_gpu_model,
)
from llmctl.builder.config import BuildRequest, choose_dtype, resolve_build_config
from llmctl.builder.models import FAMILIES, model_config
from llmctl.builder.plugin_config import OPTIONS, options_for, resolve_plugins
from llmctl.errors import BadConfig, CorruptFile, UnknownArchitecture, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.quantize.config_fields import ARCHITECTURES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def resolve(config: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, list[str]]:
    model = model_config({**LLAMA, **(config or {})}, "config.json")
    return resolve_build_config(BuildRequest(**fields), model, "bfloat16")


# ---- models ----


def test_absent_fields_have_the_familys_own_defaults() -> None:
    llama = model_config(LLAMA, "x")
    assert (llama.num_key_value_heads, llama.head_size, llama.norm_epsilon) == (4, 8, 1e-6)
    assert llama.windows == (0, 0, 0, 0) and not llama.tie_word_embeddings
    mistral = model_config(
        {**LLAMA, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16}, "x"
    )
    assert mistral.windows == (4096,) * 4 and mistral.num_key_value_heads == 8
    qwen3 = model_config(
        {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}, "x"
    )
    assert qwen3.head_size == 128 and not qwen3.has_qkv_bias


def test_qwen_windows_follow_layer_types_or_max_window_layers() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    on = {"use_sliding_window": True, "sliding_window": 16}
    assert model_config({**qwen, "sliding_window": 16}, "x").windows == (0, 0, 0, 0)
    assert model_config({**qwen, **on, "max_window_layers": 3}, "x").windows == (0, 0, 0, 16)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert model_config({**qwen, **on, "layer_types": kinds}, "x").windows == (16, 0, 16, 0)


def test_the_model_type_speaks_when_architectures_is_absent() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "architectures"}
    family = model_config({**config, "model_type": "qwen2", "num_key_value_heads": 4}, "x").family
    assert family.architecture == "Qwen2ForCausalLM"


def test_build_and_quantize_know_the_same_families() -> None:
    assert {name: family.model_type for name, family in FAMILIES.items()} == ARCHITECTURES


@pytest.mark.parametrize("architectures", [["MixtralForCausalLM"], [], ["LlamaModel", "X"]])
def test_an_unknown_architecture_is_named(architectures: list[str]) -> None:
    with pytest.raises(UnknownArchitecture, match="known: LlamaForCausalLM"):
        model_config({**LLAMA, "architectures": architectures}, "config.json")


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"hidden_size": -1}, CorruptFile, "hidden_size is -1"),
        ({"hidden_size": True}, CorruptFile, "hidden_size is True"),
        ({"vocab_size": "many"}, CorruptFile, "vocab_size is 'many'"),
        ({"num_hidden_layers": None}, CorruptFile, "num_hidden_layers is None"),
        ({"num_hidden_layers": 10**9}, CorruptFile, "at most 10000"),
        ({"num_key_value_heads": 3}, CorruptFile, "4 heads over 3"),
        ({"rope_scaling": {"factor": 2.0}}, CorruptFile, "a factor and no rope_type"),
        ({"head_dim": 7}, CorruptFile, "size 7"),
        ({"rms_norm_eps": -1.0}, CorruptFile, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, Unsupported, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "su"}}, Unsupported, "rope_type is 'su'"),
        ({"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor is 0.5"),
    ],
)
def test_impossible_configs_are_refused(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as refused:
        model_config({**LLAMA, **fields}, "config.json")
    assert refused.value.fix  # no option of a command, which a usage error would name


# ---- limits ----


def test_defaults_follow_the_model() -> None:
    config, notices = resolve()
    assert (config.max_seq_len, config.max_num_tokens, config.max_batch_size) == (1024, 2048, 8)
    assert config.max_num_rows == 8 and not notices


def test_draft_tokens_lengthen_the_default_sequence_and_the_rows() -> None:
    config, _ = resolve(max_draft_len=10)
    assert config.max_seq_len == 1034 and config.max_num_rows == 88
    assert config.speculative_decoding_mode == 2
    explicit, _ = resolve(max_draft_len=10, max_seq_len=500)
    assert explicit.max_seq_len == 500


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
    ],
)
def test_the_default_length_is_what_the_scaling_reaches(
    scaling: dict[str, Any], wanted: int
) -> None:
    assert resolve({"rope_scaling": scaling})[0].max_seq_len == wanted


def test_dynamic_rope_is_refused_beyond_its_fixed_table() -> None:
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    with pytest.raises(Unsupported, match="dynamic RoPE"):
        resolve(scaling, max_seq_len=1025)


def test_adjusted_limits_are_reported() -> None:
    config, notices = resolve(max_batch_size=64, max_draft_len=9, max_num_tokens=100)
    assert config.max_num_tokens == 640 and "raised from 100 to 640" in notices[0]
    config, notices = resolve(max_seq_len=100, max_batch_size=2)
    assert config.max_num_tokens == 200 and "lowered from 2048 to 200" in notices[0]
    _, notices = resolve(max_seq_len=5000)
    assert "longer than the 1024 tokens" in notices[0]
    _, notices = resolve(max_input_len=10)
    assert "does not limit prompts" in notices[0]


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"max_batch_size": 0}, BadConfig, "max_batch_size is 0"),
        ({"max_seq_len": 1}, BadConfig, "max_seq_len is 1"),
        ({"max_draft_len": -1}, BadConfig, "max_draft_len is -1"),
        ({"max_draft_len": 100000}, BadConfig, "a sequence has 1024 tokens"),
        ({"max_draft_len": 60, "max_seq_len": 60}, BadConfig, "a sequence has 60 tokens"),
        ({"tokens_per_block": 48}, BadConfig, "power of two"),
        ({"tokens_per_block": 256}, BadConfig, "power of two"),
        ({"dtype": "int8"}, BadConfig, "dtype is int8"),
        ({"max_input_len": 2000}, BadConfig, "exceeds max_seq_len 1024"),
        ({"speculative_decoding_mode": "draft_tokens_external"}, BadConfig, "max_draft_len 0"),
        ({"speculative_decoding_mode": "none", "max_draft_len": 3}, BadConfig, "max_draft_len 3"),
        ({"speculative_decoding_mode": "bogus"}, BadConfig, "bogus"),
        ({"max_beam_width": 2}, Unsupported, "beam search"),
        ({"logits_dtype": "float16"}, Unsupported, "float32 logits"),
        ({"gather_context_logits": True}, Unsupported, "last prompt token"),
    ],
)
def test_impossible_limits_are_refused(
    fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        resolve(**fields)


def test_a_cache_that_no_attention_of_the_backend_reads_is_refused() -> None:
    for backend in ("cpu", "cuda"):
        require_cache_type("paged", backend)
        with pytest.raises(Unsupported, match=f"{backend} backend reads the paged cache"):
            require_cache_type("continuous", backend)
    require_cache_type("continuous", "tensorrt-rtx")
    with pytest.raises(Unsupported, match="compute the whole prompt again"):
        require_cache_type("disabled", "tensorrt-rtx")


def test_a_build_config_file_is_strict() -> None:
    assert BuildRequest.from_mapping({"max_batch_size": 3}, "f").max_batch_size == 3
    assert BuildRequest.from_mapping({"max_seq_len": None}, "f").max_seq_len is None
    for values in ({"opt_batch_size": 8}, {"max_batch_size": "8"}, {"max_batch_size": True}):
        with pytest.raises(BadConfig):
            BuildRequest.from_mapping(values, "f")


def test_dtype_auto_is_what_the_checkpoint_says() -> None:
    model = model_config({**LLAMA, "torch_dtype": "float16"}, "x")
    assert choose_dtype("auto", model, "bfloat16") == "float16"
    assert choose_dtype("float32", model, "bfloat16") == "float32"
    assert choose_dtype("auto", model_config(LLAMA, "x"), "bfloat16") == "bfloat16"
    with pytest.raises(Unsupported, match="float64"):
        choose_dtype("auto", model_config({**LLAMA, "dtype": "float64"}, "x"), "float64")


# ---- plugins ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_default_is_accepted_for_every_checkpoint(backend: str) -> None:
    for is_fp8 in (False, True):
        resolved = resolve_plugins({}, "bfloat16", is_fp8, backend)
        assert set(resolved) == {"dtype", *OPTIONS}
        wanted = "enable" if is_fp8 else "disable"
        assert resolved["norm_quant_fusion"] == wanted
        assert resolved["use_fp8_context_fmha"] == "disable"
    if backend.startswith("tensorrt"):
        resolve_plugins({}, "bfloat16", True, backend, "continuous")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_accepted_value_is_stored_and_every_other_refused(name: str, backend: str) -> None:
    option = options_for(backend, "paged")[name]
    for word in option.accepted:
        value = "bfloat16" if word == "model" else word
        if backend == "cpu" and value in option.cuda_only:
            with pytest.raises(Unsupported, match=f"{value} is refused: the cpu backend has no"):
                resolve_plugins({name: value}, "bfloat16", True, backend)
            continue
        stored = resolve_plugins({name: value}, "bfloat16", True, backend)[name]
        assert stored == value or value == "auto"
    for value in ("nvfp4", "int32", "bogus"):
        with pytest.raises(Unsupported, match=f"--{name} {value} is refused: .+accepted here"):
            resolve_plugins({name: value}, "bfloat16", True, backend)


@pytest.mark.parametrize("name", [n for n, option in OPTIONS.items() if option.needs_fp8])
def test_fp8_values_need_an_fp8_checkpoint(name: str) -> None:
    value = OPTIONS[name].needs_fp8[0]
    with pytest.raises(Unsupported, match="no FP8 linears"):
        resolve_plugins({name: value}, "bfloat16", False, "cuda")


def test_another_dtype_than_the_models_is_refused() -> None:
    with pytest.raises(Unsupported, match="accepted here: auto, bfloat16"):
        resolve_plugins({"gpt_attention_plugin": "float16"}, "bfloat16", False, "cpu")


def test_an_unknown_plugin_is_refused() -> None:
    with pytest.raises(BadConfig, match="bogus_plugin"):
        resolve_plugins({"bogus_plugin": "auto"}, "bfloat16", False, "cpu")


# ---- backends ----


def test_auto_is_cuda_where_there_is_a_gpu_for_it() -> None:
    assert choose_backend("auto", lambda: True) == "cuda"
    assert choose_backend("auto", lambda: False) == "cpu"
    for name in BACKENDS:
        assert choose_backend(name, _nobody_asks) == name


def _nobody_asks() -> bool:
    raise AssertionError("a named backend does not depend on this machine")


def test_kernels_are_compiled_for_the_one_capability_there_are_kernels_for() -> None:
    assert choose_capability(None, "cpu") is None
    assert choose_capability(None, "cuda") == choose_capability("9.0", "cuda") == "9.0"
    with pytest.raises(Unsupported, match=r"compute-capability 8\.9: kernels use wgmma"):
        choose_capability("8.9", "cuda")
    with pytest.raises(BadConfig, match="no effect on cpu engines"):
        choose_capability("9.0", "cpu")


@pytest.mark.parametrize(
    ("fields", "dtype", "text"),
    [
        ({"head_dim": 128}, "float32", "the model's dtype is float32"),
        ({"head_dim": 72}, "bfloat16", "head size is 72; the cuda backend has attention for 64"),
        ({"head_dim": 64, "hidden_size": 72}, "bfloat16", "hidden_size is 72"),
        ({"head_dim": 64, "intermediate_size": 40}, "float16", "intermediate_size is 40"),
    ],
)
def test_a_model_that_no_cuda_kernel_computes_is_refused(
    fields: dict[str, Any], dtype: str, text: str
) -> None:
    with pytest.raises(Unsupported, match=text):
        require_gpu_model(model_config({**LLAMA, **fields}, "config.json"), dtype, "cuda", 1)


def test_every_head_size_with_attention_is_accepted() -> None:
    for size in (64, 80, 96, 128):
        model = model_config({**LLAMA, "head_dim": size}, "config.json")
        require_gpu_model(model, "bfloat16", "cuda", 1)
