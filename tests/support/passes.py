"""Small recorded networks."""

from __future__ import annotations

from typing import Any

from llmctl.builder.models import model_config
from llmctl.builder.models.decoder import build_network
from llmctl.builder.network import Network
from llmctl.builder.passes.attention import lower_attention
from llmctl.builder.passes.fuse import (
    fuse_quantize,
    fuse_residual,
)
from llmctl.builder.passes.gather import hoist_gather
from llmctl.builder.passes.merge import merge_linears
from llmctl.builder.passes.quantize import LinearScales, quantize_linears
from llmctl.builder.sources import RotaryTable
from llmctl.plugins.schemes.table import FP8

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def record(**fields: Any) -> Network:
    return build_network(model_config({**CONFIG, **fields}, "config.json"), "bfloat16")


def all_scales(is_static: bool = True, layers: int = 3) -> dict[str, LinearScales]:
    return {
        module: LinearScales(
            f"{module}.weight_scale", f"{module}.input_scale" if is_static else None, FP8
        )
        for layer in range(layers)
        for module in (f"model.layers.{layer}.{name}" for name in LINEARS)
    }


def ops(network: Network) -> list[str]:
    return [node.op for node in network.nodes]


def finish(network: Network, scales: dict[str, LinearScales] | None = None) -> Network:
    rope = model_config(CONFIG, "config.json").rope
    network = fuse_residual(hoist_gather(merge_linears(network)))
    network = quantize_linears(network, scales or {})
    return fuse_quantize(lower_attention(network, RotaryTable(rope, 64, 8), None))
