"""Tiny random checkpoints of every family and every form that TensorRT's backends take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmctl.builder.models import model_config
from llmctl.builder.models.decoder import build_network
from llmctl.builder.scales import checkpoint_shapes
from scripts.tensorrt.checks import fp8_description, quantize_linears

VOCAB = 131
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama tied, biased": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 9,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
# What a checkpoint stores, and of which form its linears and its KV cache are.
FORMS = ("bfloat16", "float16", "fp8", "fp8 per token")
ACTIVATION_REACH = 8.0  # of static scales; what is beyond saturates, rarely


def write_checkpoint(folder: Path, family: str, form: str, **fields: Any) -> Path:
    """A random model; `fields` change config.json."""
    dtype = form if form in ("bfloat16", "float16") else "bfloat16"
    config = {**SMALL, **FAMILIES[family], "torch_dtype": dtype, **fields}
    model = model_config(config, "test")
    shapes = checkpoint_shapes(build_network(model, dtype), None)
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name: _random(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in sorted(shapes.items())
    }
    if form.startswith("fp8"):
        is_static = form == "fp8"
        config["quantization_config"] = fp8_description(is_static=is_static)
        quantize_linears(tensors, is_static=is_static, reach=ACTIVATION_REACH)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return values * 0.3
    if "norm" in name:
        return 1 + 0.2 * values
    return values * shape[-1] ** -0.5
