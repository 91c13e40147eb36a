"""Shapes of Llama 3, as published, for checkpoints whose weights are made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama. rope_factor is that of its published config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rope_factor: float
    vocab: int = 128256
    bos: int = 128000
    eos: tuple[int, ...] = (128001, 128008, 128009)

    def linears(self) -> dict[str, tuple[int, int]]:
        """[out, in] of every linear of one layer."""
        queries, values = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (values, self.hidden),
            "self_attn.v_proj": (values, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


SHAPES = {
    # 256 places tell 4,096 random codes apart: the closest two agree in about 65 more than half
    "tiny": Shape(256, 512, 2, 4, 2, 64, 8.0, vocab=4096, bos=0, eos=(1,)),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 32.0),  # Llama 3.2
    "3b": Shape(3072, 8192, 28, 24, 8, 128, 32.0),  # Llama 3.2
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 8.0),  # Llama 3.1
    "70b": Shape(8192, 28672, 80, 64, 8, 128, 8.0),  # Llama 3.3
    "405b": Shape(16384, 53248, 126, 128, 8, 128, 8.0),  # Llama 3.1
}


def config_json(shape: Shape) -> dict[str, Any]:
    """config.json of a Llama 3 of this shape, its head apart from the embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": shape.bos,
        "eos_token_id": list(shape.eos),
        "torch_dtype": "bfloat16",
    }
