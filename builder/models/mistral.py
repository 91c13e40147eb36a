"""Mistral 7B, Nemo, Small: no biases, one sliding window for every layer or none."""

from collections.abc import Mapping
from typing import Any

from llmctl.builder.models.family import Family, never


def _one_window(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    return (config["sliding_window"] or 0,) * num_layers


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    qkv_bias=never,
    o_bias=never,
    mlp_bias=never,
    windows=_one_window,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,  # absent means 4096; null means full attention
    },
)
