"""Qwen3 dense: RMSNorm on every query and key head, explicit head size, no biases by default."""

from llmctl.builder.models.family import Family, flag, late_layers_window, never

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    qkv_bias=flag("attention_bias"),
    o_bias=flag("attention_bias"),
    mlp_bias=never,
    windows=late_layers_window,
    has_qk_norm=True,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
