"""The tensors of an EAGLE head and their shapes.

EAGLE-3's are listed in checkpoint.py. A head of EAGLE-1 or 2 has the target's embedding (a copy
may be stored), output matrix and last norm, no norms before its attention, and one feature:

    fc.weight                                        [hidden, 2 hidden]
    fc.bias                                          [hidden]; if there is, as `bias` may say
    layers.0.self_attn.{q,k,v}_proj.weight           [heads * size, hidden]
    layers.0.self_attn.o_proj.weight                 [hidden, heads * size]
    layers.0.mlp.{gate,up,down}_proj.weight, layers.0.post_attention_layernorm.weight
"""

from __future__ import annotations

from collections.abc import Container

from llmctl.builder.heads.eagle.config import HeadConfig

LAYER = "layers.0"
EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
QK_NORMS = tuple(f"{LAYER}.self_attn.{part}_norm.weight" for part in "qk")
ONLY_OF_3 = (f"{LAYER}.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t")

Shapes = dict[str, tuple[int, ...]]


def wanted_shapes(
    config: HeadConfig, version: int, found: Container[str], num_taps: int, target_hidden: int
) -> Shapes:
    """The tensors of a head but its vocabulary maps. found: names, for those that may be absent."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    heads, kv_heads = config.num_heads * size, config.num_kv_heads * size
    features = num_taps * target_hidden
    width = hidden if version == 1 else 2 * hidden  # of what attention reads
    shapes: Shapes = {
        "fc.weight": (hidden, hidden + features if version == 1 else features),
        f"{LAYER}.self_attn.q_proj.weight": (heads, width),
        f"{LAYER}.self_attn.k_proj.weight": (kv_heads, width),
        f"{LAYER}.self_attn.v_proj.weight": (kv_heads, width),
        f"{LAYER}.self_attn.o_proj.weight": (hidden, heads),
        f"{LAYER}.mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.down_proj.weight": (hidden, inner),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
    }
    if version == 1:
        has_bias = FC_BIAS in found if config.has_fc_bias is None else config.has_fc_bias
        return shapes | ({FC_BIAS: (hidden,)} if has_bias else {})
    shapes |= {
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{LAYER}.input_layernorm.weight": (hidden,),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (target_hidden,) for tap in range(num_taps)}
    if any(name in found for name in QK_NORMS):
        shapes |= dict.fromkeys(QK_NORMS, (size,))
    if EMBEDDING in found:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    return shapes
