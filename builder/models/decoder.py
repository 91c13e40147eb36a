"""The decoder shared by every family; a family only defines which parts it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmctl.builder.functional import (
    add,
    embedding,
    gather_rows,
    gpt_attention,
    linear,
    mul,
    parameter,
    rms_norm,
    silu,
)
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import LOGITS, Network, Output, Tensor, recording
from llmctl.errors import BadConfig

EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"
HIDDEN = "hidden"


def build_network(model: ModelConfig, dtype: str, outputs: Sequence[str] = ()) -> Network:
    """Record the model in `dtype`. Its outputs are logits [rows, vocab_size] float32 and those
    asked for: HIDDEN, what the output projection reads [rows, hidden_size]; "layers.3", what layer
    3 reads before its norm [tokens, hidden_size], for any layer; the number behind the last layer's
    is HIDDEN for all tokens.
    """
    with recording(Network(dtype)) as network:
        weight = parameter(f"{EMBEDDING}.weight", model.vocab_size, model.hidden_size)
        hidden = embedding(weight, name=EMBEDDING)
        for layer in range(model.num_hidden_layers):
            if f"layers.{layer}" in outputs:
                network.outputs[f"layers.{layer}"] = Output(hidden.name, for_all_tokens=True)
            hidden = _layer(model, layer, hidden)
        last = f"layers.{model.num_hidden_layers}"
        if last in outputs:
            hidden = _norm(model, hidden, "model.norm")
            network.outputs[last] = Output(hidden.name, for_all_tokens=True)
            hidden = gather_rows(hidden, name="model.gather_rows")
        else:
            hidden = gather_rows(hidden, name="model.gather_rows")
            hidden = _norm(model, hidden, "model.norm")
        if not model.tie_word_embeddings:
            weight = parameter(f"{LM_HEAD}.weight", model.vocab_size, model.hidden_size)
        if HIDDEN in outputs:
            network.outputs[HIDDEN] = Output(hidden.name)
        logits = linear(hidden, weight, name=LM_HEAD, dtype="float32")
        network.outputs[LOGITS] = Output(logits.name)
    _require_known(outputs, network.outputs, model.num_hidden_layers)
    return network


def _require_known(outputs: Sequence[str], found: Mapping[str, Output], num_layers: int) -> None:
    for name in outputs:
        if name not in found:
            raise BadConfig(
                f"the model has no output {name!r}; {HIDDEN} and layers.0 to "
                f"layers.{num_layers} are there"
            )


def _layer(model: ModelConfig, layer: int, hidden: Tensor) -> Tensor:
    prefix = f"model.layers.{layer}"
    x = _norm(model, hidden, f"{prefix}.input_layernorm")
    hidden = add(_attention(model, layer, x), hidden, name=f"{prefix}.attention_residual")
    x = _norm(model, hidden, f"{prefix}.post_attention_layernorm")
    return add(_mlp(model, x, f"{prefix}.mlp"), hidden, name=f"{prefix}.mlp_residual")


def _attention(model: ModelConfig, layer: int, x: Tensor) -> Tensor:
    prefix = f"model.layers.{layer}.self_attn"
    size, has_bias = model.head_size, model.has_qkv_bias
    q = _linear(x, f"{prefix}.q_proj", model.num_attention_heads * size, has_bias)
    k = _linear(x, f"{prefix}.k_proj", model.num_key_value_heads * size, has_bias)
    v = _linear(x, f"{prefix}.v_proj", model.num_key_value_heads * size, has_bias)
    has_norm = model.family.has_qk_norm
    out = gpt_attention(
        q,
        k,
        v,
        parameter(f"{prefix}.q_norm.weight", size) if has_norm else None,
        parameter(f"{prefix}.k_norm.weight", size) if has_norm else None,
        name=f"{prefix}.attention",
        layer=layer,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_size=size,
        window=model.windows[layer],
        epsilon=model.norm_epsilon,
    )
    return _linear(out, f"{prefix}.o_proj", model.hidden_size, model.has_o_bias)


def _mlp(model: ModelConfig, x: Tensor, prefix: str) -> Tensor:
    inner, has_bias = model.intermediate_size, model.has_mlp_bias
    gate = _linear(x, f"{prefix}.gate_proj", inner, has_bias)
    up = _linear(x, f"{prefix}.up_proj", inner, has_bias)
    product = mul(silu(gate, name=f"{prefix}.act"), up, name=f"{prefix}.product")
    return _linear(product, f"{prefix}.down_proj", model.hidden_size, has_bias)


def _norm(model: ModelConfig, x: Tensor, name: str) -> Tensor:
    return rms_norm(
        x, parameter(f"{name}.weight", model.hidden_size), model.norm_epsilon, name=name
    )


def _linear(x: Tensor, name: str, out_features: int, has_bias: bool) -> Tensor:
    in_features = x.shape[1]
    assert isinstance(in_features, int)
    weight = parameter(f"{name}.weight", out_features, in_features)
    bias = parameter(f"{name}.bias", out_features) if has_bias else None
    return linear(x, weight, bias, name=name)
