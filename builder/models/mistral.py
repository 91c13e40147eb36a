"""Mistral 7B, Nemo, Small, and Ministral where it declares itself a Mistral with `layer_types`: no
biases, one sliding window for every layer, for those of `layer_types`, or none."""

from collections.abc import Mapping
from typing import Any

from llmctl.builder.models.family import Family, never, windows_of


def _one_window(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    window, kinds = config["sliding_window"] or 0, config.get("layer_types")
    return (window,) * num_layers if kinds is None else windows_of(kinds, window)


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
