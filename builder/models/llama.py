"""Llama 2, 3, 3.1, 3.2, 3.3 and every checkpoint that declares LlamaForCausalLM."""

from llmctl.builder.models.family import Family, flag, full_attention

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    qkv_bias=flag("attention_bias"),
    o_bias=flag("attention_bias"),
    mlp_bias=flag("mlp_bias"),
    windows=full_attention,
    defaults={"max_position_embeddings": 2048},
)
