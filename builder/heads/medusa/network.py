"""Medusa heads as a graph beside the base graph.

Each head reads the base graph's last hidden rows, those that the output projection reads:

    x = x + SiLU(linear(x) + bias)     for each residual block
    logits = linear(x)                 [requests, vocab_size] float32

The rows come first: a step leaves one for each draft, and heads read one of each request.
"""

from __future__ import annotations

from llmctl.builder.functional import (
    add,
    gather_rows,
    graph_input,
    graph_output,
    linear,
    parameter,
    silu,
)
from llmctl.builder.heads.medusa.checkpoint import MODULE
from llmctl.builder.heads.medusa.tree import GRAPH, logits_name
from llmctl.builder.models.decoder import HIDDEN
from llmctl.builder.network import Network, Tensor, recording
from llmctl.builder.plan import BASE


def record_medusa(
    num_heads: int, num_layers: int, hidden_size: int, vocab_size: int, dtype: str
) -> Network:
    """The graph of so many heads with so many residual blocks each. Its step's logit_rows say which
    hidden rows are read, one a request; its outputs are `logits_name` of each head."""
    with recording(Network(dtype, name=GRAPH)) as network:
        hidden = graph_input(HIDDEN, "rows", hidden_size, source=(BASE, HIDDEN))
        rows = gather_rows(hidden, name=f"{GRAPH}.gather_rows", most="requests")
        for head in range(num_heads):
            x = rows
            for layer in range(num_layers):
                x = _block(x, f"{MODULE}.{head}.{layer}", hidden_size)
            name = f"{MODULE}.{head}.{num_layers}"
            weight = parameter(f"{name}.weight", vocab_size, hidden_size)
            graph_output(logits_name(head), linear(x, weight, name=name, dtype="float32"))
    return network


def _block(x: Tensor, name: str, width: int) -> Tensor:
    weight = parameter(f"{name}.linear.weight", width, width)
    bias = parameter(f"{name}.linear.bias", width)
    gate = silu(linear(x, weight, bias, name=f"{name}.linear"), name=f"{name}.act")
    return add(gate, x, name=f"{name}.residual")
