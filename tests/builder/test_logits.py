"""Logits of every family at FP32 equal those of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MAX_RELATIVE_ERROR = 1e-4  # max |a - b| / max |b|, the acceptance limit of the project

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama one layer": ("llama", {"num_hidden_layers": 1}),
    "llama heads 7 to 1": (
        "llama",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
    ),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama head size 80": ("llama", {"head_dim": 80}),
    "llama head size 96": ("llama", {"head_dim": 96}),
    "llama head size 128": ("llama", {"head_dim": 128}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3 scaling": ("llama", {"rope_parameters": LLAMA3_SCALING}),
    "llama linear scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama dynamic scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 64}),
    "mistral window": ("mistral", {"sliding_window": 10}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2 late window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "qwen3 tied, biased": (
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, program_name: str, new_model, save, build_engine, open_test_engine, some_tokens
) -> None:
    family, fields = CASES[case]
    model = new_model(family, **fields)
    tokens = some_tokens(37)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    engine = open_test_engine(build_engine(save(model)), program_name)
    assert relative_error(engine.run(tokens), wanted) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("case", ["llama heads 7 to 1", "mistral window", "qwen3"])
def test_chunks_and_single_tokens_give_the_logits_of_one_prefill(
    case: str, program_name: str, new_model, save, build_engine, open_test_engine, some_tokens
) -> None:
    family, fields = CASES[case]
    folder = build_engine(save(new_model(family, **fields)), tokens_per_block=16)
    tokens = some_tokens(41)
    whole = open_test_engine(folder, program_name).run(tokens)
    for cuts in ((0, 16, 32, 41), (0, 1, 40, 41), tuple(range(42))):
        engine = open_test_engine(folder, program_name)
        parts = [
            engine.run(tokens[start:stop], start)
            for start, stop in zip(cuts, cuts[1:], strict=False)
        ]
        error = relative_error(torch.cat(parts), whole)
        # The CPU backend promises the same bits; the reference calls torch, which does not.
        assert error == 0 if program_name == "cpu" else error < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_within_its_own_rounding_of_transformers(
    dtype: str, program_name: str, new_model, save, build_engine, open_test_engine, some_tokens
) -> None:
    model = new_model("llama", dtype=dtype)
    tokens = some_tokens(37)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].float()
    engine = open_test_engine(build_engine(save(model)), program_name)
    limit = 0.02 if dtype == "bfloat16" else 0.003  # a few units in the last place
    assert relative_error(engine.run(tokens), wanted) < limit


def test_dtype_converts_the_weights(
    new_model, save, build_engine, open_test_engine, some_tokens
) -> None:
    checkpoint = save(new_model("llama"))
    tokens = some_tokens(20)
    exact = open_test_engine(build_engine(checkpoint), "reference").run(tokens)
    rounded = open_test_engine(build_engine(checkpoint, dtype="bfloat16"), "reference").run(tokens)
    assert 0 < relative_error(rounded, exact) < 0.05
