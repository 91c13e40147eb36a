"""What config.json says of attention, RoPE and the output projection, as AutoModel reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_checkpoints import configure, put, refuse
from support.checkpoint import edit
from transformers import AutoModelForCausalLM

from llmctl.errors import CorruptFile, LlmctlError, Unsupported

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5}
# name -> (family, the whole model's fields, what config.json says besides)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral of two kinds": ("mistral", {"sliding_window": 5}, {"layer_types": [SLIDING, FULL]}),
    "mistral of full layers": ("mistral", {"sliding_window": 5}, {"layer_types": [FULL, FULL]}),
    "mistral, no types": ("mistral", {"sliding_window": 5}, {"layer_types": None}),
    "qwen2, types against the layer": (
        "qwen2",
        {**WINDOWED, "max_window_layers": 1},
        {"layer_types": [SLIDING, FULL]},
    ),
    "qwen3, a window that is off": (
        "qwen3",
        {"head_dim": 32},
        {"use_sliding_window": False, "sliding_window": 5, "layer_types": None},
    ),
    "llama of full layers": ("llama", {}, {"sliding_window": 5, "layer_types": [FULL, FULL]}),
    "llama, a window of every position": ("llama", {}, {"sliding_window": 128}),
    "two RoPEs": ("llama", {}, {"rope_scaling": LINEAR, "rope_parameters": DEFAULT}),
    "two RoPEs, the other way": ("llama", {}, {"rope_scaling": DEFAULT, "rope_parameters": LINEAR}),
    "an empty rope_scaling": ("llama", {}, {"rope_scaling": {}, "rope_parameters": DEFAULT}),
    "two thetas": ("llama", {}, {"rope_theta": 90.0, "rope_parameters": DEFAULT}),
    "theta beside rope_scaling": (
        "llama",
        {},
        {"rope_theta": 90.0, "rope_scaling": LINEAR, "rope_parameters": DEFAULT},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model_that_transformers_loads(
    case: str, new_model, save, build_engine, open_test_engine, some_tokens
) -> None:
    family, fields, says = CASES[case]
    folder = configure(save(new_model(family, **fields)), **says)
    require_same_logits(folder, build_engine, open_test_engine, some_tokens)


@pytest.mark.parametrize("is_other", [True, False], ids=["another", "a copy"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_tied_checkpoint_with_an_output_projection_uses_it_where_it_differs(
    family: str, is_other: bool, new_model, save, build_engine, open_test_engine, some_tokens
) -> None:
    model = new_model(family, tie_word_embeddings=True)
    head = model.get_input_embeddings().weight.detach().clone()
    if is_other:
        head[130] *= -1.0  # the last row alone
    folder = edit(save(model), put("lm_head.weight", head))
    engine = require_same_logits(folder, build_engine, open_test_engine, some_tokens)
    assert ("lm_head.weight" in engine.tensors) == is_other


def require_same_logits(folder: Path, build_engine, open_test_engine, some_tokens) -> Any:
    tokens = some_tokens(37)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    engine = open_test_engine(build_engine(folder), "reference")
    assert float((engine.run(tokens) - wanted).abs().max() / wanted.abs().max()) < 1e-4
    return engine


@pytest.mark.parametrize(
    ("family", "says", "error", "text"),
    [
        ("llama", {"is_causal": False}, Unsupported, "is_causal is False"),
        ("qwen2", {"is_causal": False}, Unsupported, "is_causal is False"),
        ("llama", {"attention_chunk_size": 4}, Unsupported, "attention_chunk_size is 4"),
        ("llama", {"sliding_window": 5}, Unsupported, "full attention in every layer"),
        ("llama", {"layer_types": [SLIDING, FULL]}, Unsupported, "full attention in every"),
        ("qwen3", {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, Unsupported, "per_layer_c"),
        ("llama", {"kv_sharing_modes": ["compute", "reuse"]}, Unsupported, "kv_sharing_modes is"),
        ("mistral", {"sliding_window": 0}, CorruptFile, "sliding_window is 0"),
        (
            "mistral",
            {"sliding_window": None, "layer_types": [SLIDING, FULL]},
            CorruptFile,
            "sliding_window is None",
        ),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": [SLIDING, FULL]},
            CorruptFile,
            "use_sliding_window False",
        ),
    ],
)
def test_attention_that_no_engine_has_is_refused(
    family: str, says: dict[str, Any], error: type[LlmctlError], text: str, new_model, save
) -> None:
    refuse(configure(save(new_model(family)), **says), error, text)
