"""What every engine's config.json says of its model, for engines that tests write themselves."""

from __future__ import annotations

PRETRAINED = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
}
