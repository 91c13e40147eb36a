"""The tensors of an EAGLE head and their shapes.

EAGLE-3's are listed in checkpoint.py. A head of EAGLE-1 or 2 has the target's embedding (a copy
may be stored), output matrix and last norm, no norms before its attention, and one feature:

    fc.weight                                        [hidden, 2 hidden]
    fc.bias                                          [hidden]; if there is, as `bias` may say
    layers.0.self_attn.{q,k,v}_proj.weight           [heads * size, hidden]
    layers.0.self_attn.o_proj.weight                 [hidden, heads * size]
    layers.0.mlp.{gate,up,down}_proj.weight, layers.0.post_attention_layernorm.weight

Layers behind the first are the same in both: those of a Llama decoder, with input_layernorm.
"""

from __future__ import annotations

from collections.abc import Container

from llmctl.builder.heads.eagle.config import HeadConfig

FIRST = "layers.0"
EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
ONLY_OF_3 = (f"{FIRST}.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t")

Shapes = dict[str, tuple[int, ...]]


def qk_norms(layer: int) -> tuple[str, ...]:
    """Those of a qwen3 layer."""
    return tuple(f"layers.{layer}.self_attn.{part}_norm.weight" for part in "qk")


def wanted_shapes(
    config: HeadConfig,
    version: int,
    found: Container[str],
    num_layers: int,
    num_taps: int,
    target_hidden: int,
) -> Shapes:
    """The tensors of a head but its vocabulary maps. found: names, for those that may be absent."""
    hidden = config.hidden_size
    features = num_taps * target_hidden
    shapes: Shapes = {"fc.weight": (hidden, hidden + features if version == 1 else features)}
    for layer in range(num_layers):
        shapes |= _of_layer(config, version, found, layer)
    if version == 1:
        has_bias = FC_BIAS in found if config.has_fc_bias is None else config.has_fc_bias
        return shapes | ({FC_BIAS: (hidden,)} if has_bias else {})
    shapes |= {
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        f"{FIRST}.hidden_norm.weight": (hidden,),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (target_hidden,) for tap in range(num_taps)}
    if EMBEDDING in found:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    return shapes


def _of_layer(config: HeadConfig, version: int, found: Container[str], layer: int) -> Shapes:
    """A decoder layer's. The first of EAGLE-3 attends to two vectors side by side, and that of
    EAGLE-1 has no norm before its attention."""
    prefix, is_first = f"layers.{layer}", layer == 0
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    heads, kv_heads = config.num_heads * size, config.num_kv_heads * size
    width = 2 * hidden if is_first and version == 3 else hidden  # of what attention reads
    shapes: Shapes = {
        f"{prefix}.self_attn.q_proj.weight": (heads, width),
        f"{prefix}.self_attn.k_proj.weight": (kv_heads, width),
        f"{prefix}.self_attn.v_proj.weight": (kv_heads, width),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if not is_first or version == 3:
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
    if version == 3 and any(name in found for name in qk_norms(0)):
        shapes |= dict.fromkeys(qk_norms(layer), (size,))
    return shapes
