"""Qwen2 and Qwen2.5: biases on q, k and v only; an optional window on the late layers."""

from llmctl.builder.models.family import Family, always, late_layers_window, never

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    qkv_bias=always,
    o_bias=never,
    mlp_bias=never,
    windows=late_layers_window,
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
