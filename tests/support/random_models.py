"""Random models of every family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def make_model(
    family: str, seed: int = 0, dtype: str = "float32", gain: float = 1.0, **fields: Any
) -> PreTrainedModel:
    """A random model with weights of a size that makes every part of the network matter.

    gain scales the linears: with 1.0 a small error grows from layer to layer, with less it stays.
    """
    small = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(seed)
    config = CONFIGS[family](**{**small, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                scale = gain if "proj" in name else 1.0
                parameter.normal_(0, scale * parameter.shape[-1] ** -0.5)
    model.config.architectures = [type(model).__name__]  # as from_pretrained leaves it
    return model.to(getattr(torch, dtype))
