"""Medusa heads as a graph beside the base graph.

Each head reads the base graph's last hidden rows, those that the output projection reads:

    x = x + SiLU(linear(x) + bias)     for each residual block
    logits = linear(x)                 [requests, vocab_size] float32

The last matrix is a head's own, one of all heads, or the target's output projection.

The rows come first: a step leaves one for each draft, and heads read one of each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.functional import (
    add,
    gather_rows,
    graph_input,
    graph_output,
    linear,
    parameter,
    silu,
)
from llmctl.builder.heads.medusa.layouts import COMMON, MODULE, OWN, SHARED, TARGETS
from llmctl.builder.heads.medusa.tree import GRAPH, logits_name
from llmctl.builder.models.decoder import EMBEDDING, HIDDEN, LM_HEAD
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network, Tensor, recording
from llmctl.builder.plan import BASE


def record_medusa(model: ModelConfig, facts: Mapping[str, Any], dtype: str) -> Network:
    """The graph of the heads that the facts of `prepare_medusa` tell of. Its step's logit_rows say
    which hidden rows are read, one a request; its outputs are `logits_name` of each head."""
    width = model.hidden_size
    with recording(Network(dtype, name=GRAPH)) as network:
        hidden = graph_input(HIDDEN, "rows", width, source=(BASE, HIDDEN))
        rows = gather_rows(hidden, name=f"{GRAPH}.gather_rows", most="requests")
        for head in range(facts["num_heads"]):
            x = rows
            for layer in range(facts["num_layers"]):
                x = _block(x, f"{MODULE}.{head}.{layer}", width, facts["has_bias"])
            name = f"{MODULE}.{head}.{facts['num_layers']}"
            matrices = {
                OWN: name,
                COMMON: f"{MODULE}.{SHARED}",
                TARGETS: EMBEDDING if model.tie_word_embeddings else LM_HEAD,
            }
            weight = parameter(f"{matrices[facts['output']]}.weight", model.vocab_size, width)
            graph_output(logits_name(head), linear(x, weight, name=name, dtype="float32"))
    return network


def _block(x: Tensor, name: str, width: int, has_bias: bool) -> Tensor:
    weight = parameter(f"{name}.linear.weight", width, width)
    bias = parameter(f"{name}.linear.bias", width) if has_bias else None
    gate = silu(linear(x, weight, bias, name=f"{name}.linear"), name=f"{name}.act")
    return add(gate, x, name=f"{name}.residual")
