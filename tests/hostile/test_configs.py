"""config.json, generation_config.json and the quantization documents of strangers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from support.hostile import (
    CONFIG,
    NO_ANSWERS,
    attempt,
    bounded,
    build,
    require_named,
    run,
    token_ids,
    write,
)
from support.mutations import Mutation, mutations

from llmctl.errors import LlmctlError
from llmctl.quantize.plan import QuantizeOptions, plan_quantization

TEXT = json.dumps(CONFIG)
ROPE = CONFIG["rope_scaling"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GROUP = {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}


def member(text: str) -> str:
    """config.json with one more member, which need not be JSON."""
    return TEXT[:-1] + "," + text + "}"


# What a field is set to, and words of the refusal.
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": "LlamaForCausalLM"}, "a list of names is wanted"),
    ({"architectures": 0}, "a list of names is wanted"),
    ({"architectures": [None]}, "a list of names is wanted"),
    ({"architectures": ["Llama\ud800"]}, "half of a surrogate pair"),
    ({"model_type": "mistral"}, "model_type is 'mistral'"),
    ({"model_type": []}, "model_type is []; text is wanted"),
    ({"max_position_embeddings": 10**18}, "max_position_embeddings is 1000000000000000000"),
    ({"max_position_embeddings": -1}, "an integer from 1"),
    ({"vocab_size": 10**9}, "vocab_size is 1000000000"),
    ({"vocab_size": "260"}, "vocab_size is '260'"),
    ({"hidden_size": 2**63}, "hidden_size is"),
    ({"intermediate_size": 64.0}, "intermediate_size is 64.0"),
    ({"num_hidden_layers": 10**6}, "at most 10000"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"head_dim": 10**12}, "head_dim is"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rms_norm_eps": True}, "rms_norm_eps is True"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; true or false is wanted"),
    ({"attention_bias": []}, "attention_bias is []"),
    ({"mlp_bias": 0}, "mlp_bias is 0"),
    ({"hidden_act": {}}, "hidden_act is {}"),
    ({"torch_dtype": 5}, "torch_dtype is 5"),
    ({"rope_theta": 10**400}, "rope_theta is"),
    ({"rope_theta": "10000"}, "rope_theta is '10000'"),
    ({"rope_theta": 0.5}, "rope_theta is 0.5"),
    ({"rope_scaling": []}, "rope_scaling is []; an object is wanted"),
    ({"rope_scaling": {**ROPE, "beta_fast": -1}}, "beta_fast is -1"),
    ({"rope_scaling": {**ROPE, "beta_fast": "32"}}, "beta_fast is '32'"),
    ({"rope_scaling": {**ROPE, "attention_factor": 0}}, "attention_factor is 0"),
    ({"rope_scaling": {**ROPE, "truncate": "no"}}, "truncate is 'no'"),
    ({"rope_scaling": {**ROPE, "factor": 0.001}}, "factor is 0.001"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "factor is 1e+308"),
    ({"rope_scaling": {"full_attention": ROPE}}, "one RoPE for all layers"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1"),
    ({"max_position_embeddings": 10**8, "rope_scaling": {"type": "linear", "factor": 8.0}},
     "RoPE stretches 100000000 positions to 800000000"),
    ({"layer_types": ["chunked_attention"]}, "layer_types is"),
    ({"sliding_window": "4096"}, "sliding_window is '4096'"),
    ({"eos_token_id": 10**6}, "eos_token_id holds 1000000; the vocabulary has the ids 0 to 259"),
    ({"eos_token_id": -1}, "eos_token_id holds -1"),
    ({"eos_token_id": [1, "x"]}, "eos_token_id is [1, 'x']"),
    ({"eos_token_id": True}, "eos_token_id is True"),
    ({"eos_token_id": [1] * 1000}, "a list of at most 256"),
    ({"bos_token_id": "<s>"}, "bos_token_id is '<s>'"),
    ({"pad_token_id": 2**40}, "pad_token_id is"),
    ({"quantization_config": []}, "quantization_config is []; an object is wanted"),
    ({"quantization_config": False}, "quantization_config is False"),
    ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method is"),
    ({"quantization_config": {"config_groups": {"g": None}}}, "quantized by compressed-tensors"),
    ({"quantization_config": {"config_groups": {
        "g": {**GROUP, "input_activations": {"dynamic": "false"}}}}}, "dynamic of the activations"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
                              "ignore": ["re:((m|o|d|e|l|[.]|[a-z]+)+)+Z"]}}, "too involved"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
                              "ignore": ["re:" + "(" * 5000]}}, "too involved"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
                              "ignore": ["re:["]}}, "not a regular expression"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), FIELDS)
def test_a_field_of_the_wrong_type_or_size_is_refused_by_name(
    checkpoint: Path, fields: dict[str, Any], words: str
) -> None:
    write(checkpoint / "config.json", CONFIG | fields)
    outcome = build(checkpoint, checkpoint.parent / "engine")
    require_named(outcome)
    assert outcome.code in (1, 2) and words in outcome.message


@pytest.mark.parametrize("window", ["x", [1], {}, 1.5, -1, True, 2**40])
def test_a_window_that_is_no_number_of_tokens_is_refused(checkpoint: Path, window: Any) -> None:
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    write(checkpoint / "config.json", CONFIG | names | {"sliding_window": window})
    outcome = build(checkpoint, checkpoint.parent / "engine")
    require_named(outcome, "CorruptFile")
    assert "sliding_window is" in outcome.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ("null", "an object is wanted"),
        (TEXT + "x", "Extra data"),
        (member('"x": NaN'), "NaN is not JSON"),
        (member('"x": 1e999'), "does not fit a double"),
        (member('"vocab_size": 260'), "the key 'vocab_size' occurs twice"),
        (member('"x": ' + "9" * 5000), "4300"),
        (member('"x": ' + "[" * 100_000), "nested too deeply"),
        (member('"x": "\\ud800"'), "half of a surrogate pair"),
        (b"\xff\xfe\x00", "not valid JSON"),
    ],
)
def test_a_config_that_is_not_json_is_refused(
    checkpoint: Path, text: str | bytes, words: str
) -> None:
    write(checkpoint / "config.json", text)
    for outcome in (
        build(checkpoint, checkpoint.parent / "engine"),
        attempt("inspect", checkpoint, "--json"),
    ):
        require_named(outcome, "CorruptFile")
        assert words in outcome.message


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "an object is wanted"),
        ({"eos_token_id": 10**6}, "eos_token_id holds 1000000"),
        ({"eos_token_id": [1, -5]}, "eos_token_id is [1, -5]"),
        ({"eos_token_id": [[1]]}, "eos_token_id is [[1]]"),
        ({"eos_token_id": "1"}, "eos_token_id is '1'"),
        ({"eos_token_id": list(range(250)) * 4000}, "a list of at most 256"),
        ({"bos_token_id": 2**64}, "bos_token_id is"),
    ],
)
def test_end_ids_of_a_generation_config_are_ids_of_the_vocabulary(
    checkpoint: Path, document: Any, words: str
) -> None:
    write(checkpoint / "generation_config.json", document)
    outcome = build(checkpoint, checkpoint.parent / "engine")
    require_named(outcome, "CorruptFile")
    assert words in outcome.message and "generation_config.json" in outcome.message


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "an object is wanted"),
        ({"quantization": []}, "quantization of hf_quant_config.json is []"),
        ({"quantization": None}, "is None; an object is wanted"),
        ({"quantization": {"quant_algo": 5}}, "quant_algo is 5"),
        ({"quantization": {"quant_algo": ["FP8"]}}, "quant_algo is ['FP8']"),
        ({"quantization": {"quant_algo": "x" * 10**6}}, "is quantized by modelopt as xxx"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": False}}, "is False"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": "lm_head"}}, "not a list"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["a"] * 10**5}}, "at most"),
        ({"quantization": {"quant_algo": "FP8"}}, "but the config declares FP8"),
    ],
)
def test_odd_quantization_documents_are_refused(
    checkpoint: Path, document: Any, words: str
) -> None:
    write(checkpoint / "hf_quant_config.json", document)
    outcome = build(checkpoint, checkpoint.parent / "engine")
    require_named(outcome, "CorruptFile", "UnknownQuantization", "BadTensorShape")
    assert words in outcome.message


@settings(max_examples=120)
@given(mutation=mutations(CONFIG))
def test_a_mutated_config_is_refused_or_builds_an_engine_that_runs(
    lasting: Callable[[], Path], mutation: Mutation
) -> None:
    folder = lasting()
    write(folder / "config.json", mutation.apply(CONFIG))
    engine = folder.parent / "engine"
    outcome = build(folder, engine)
    if outcome.code:
        require_named(outcome)
        return
    assert not mutation.is_retyped or mutation.path == ("eos_token_id",), mutation  # or a list
    assert len(token_ids(run(engine, "--input-text", "def f"))) == 2


@settings(max_examples=80)
@given(mutation=mutations(CONFIG))
def test_a_mutated_config_is_refused_or_planned_by_quantize(
    lasting: Callable[[], Path], mutation: Mutation
) -> None:
    folder = lasting()
    write(folder / "config.json", mutation.apply(CONFIG))
    options = QuantizeOptions(folder, folder.parent / "out", calib_size=4, calib_max_seq_length=16)
    with bounded():
        try:
            plan_quantization(options)
        except LlmctlError as error:
            assert error.name not in NO_ANSWERS and len(str(error)) < 1000, error
            return
    assert not mutation.is_retyped or mutation.path == ("eos_token_id",), mutation
