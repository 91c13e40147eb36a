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
from llmctl.plugins.quantize.reference import quantize_static

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
_ACTIVATION_RANGE = 8.0  # static scales reach to it; what is beyond saturates, rarely
_CACHE_RANGE = 6.0


def write_checkpoint(folder: Path, family: str, form: str, **fields: Any) -> Path:
    """A random model; `fields` change config.json."""
    dtype = form if form in ("bfloat16", "float16") else "bfloat16"
    config = {**SMALL, **FAMILIES[family], "torch_dtype": dtype, **fields}
    model = model_config(config, "test")
    shapes = checkpoint_shapes(build_network(model, dtype))
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name: _random(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in sorted(shapes.items())
    }
    if form.startswith("fp8"):
        config["quantization_config"] = _quantization(is_static=form == "fp8")
        _quantize(tensors, is_static=form == "fp8", num_layers=model.num_hidden_layers)
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


def _quantize(tensors: dict[str, torch.Tensor], *, is_static: bool, num_layers: int) -> None:
    """Linears become FP8: one weight scale and one input scale, or a weight scale a row."""
    for name in [n for n in tensors if "_proj.weight" in n]:
        module, weight = name.removesuffix(".weight"), tensors[name].float()
        largest = weight.abs().amax() if is_static else weight.abs().amax(1, keepdim=True)
        scale = largest / 448
        tensors[name] = quantize_static(weight, scale)
        tensors[f"{module}.weight_scale"] = scale.clone()
        if is_static:
            tensors[f"{module}.input_scale"] = torch.tensor(_ACTIVATION_RANGE / 448)
    if is_static:
        for layer in range(num_layers):
            attention = f"model.layers.{layer}.self_attn"
            tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(_CACHE_RANGE / 448)
            tensors[f"{attention}.v_proj.v_scale"] = torch.tensor(_CACHE_RANGE / 448)


def _quantization(*, is_static: bool) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float"}
    weights = {**number, "dynamic": False, "strategy": "tensor" if is_static else "channel"}
    inputs = {**number, "dynamic": not is_static}
    inputs["strategy"] = "tensor" if is_static else "token"
    group = {"input_activations": inputs, "weights": weights, "targets": ["Linear"]}
    document: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    if is_static:
        document["kv_cache_scheme"] = {**number, "dynamic": False, "strategy": "tensor"}
    return document
