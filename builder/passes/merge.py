"""Merge linear layers that read the same input: q, k, v into one, gate and up into one.

The merged weight is the parts' rows one after another, so nothing is requantized: an FP8 part keeps
its own scale, repeated over its rows (see passes/quantize.py).
"""

from __future__ import annotations

from llmctl.builder.network import Network, Node
from llmctl.builder.sources import Rows


def merge_linears(network: Network) -> Network:
    """gpt_attention(q, k, v) reads one qkv linear; mul(silu(gate), up) becomes swiglu(gate_up)."""
    merged = network.copy()
    for node in network.nodes:
        if node.op == "gpt_attention":
            _merge_qkv(merged, node)
        elif node.op == "mul":
            _merge_gate_up(merged, node)
    merged.prune()
    return merged


def _merge_qkv(network: Network, attention: Node) -> None:
    parts = [_producer(network, attention.inputs[role], "linear") for role in ("q", "k", "v")]
    name = parts[0].name.replace("q_proj", "qkv_proj")
    merged = _merge(network, parts, name)
    others = {r: t for r, t in attention.inputs.items() if r not in ("q", "k", "v")}
    inputs = {"qkv": merged.outputs["out"], **others}
    node = Node(attention.op, attention.name, inputs, attention.outputs, attention.attributes)
    network.replace_nodes(parts, [merged], at=parts[0])
    network.replace_nodes([attention], [node], at=attention)


def _merge_gate_up(network: Network, mul: Node) -> None:
    silu = _producer(network, mul.inputs["x"], "silu")
    gate = _producer(network, silu.inputs["x"], "linear")
    up = _producer(network, mul.inputs["y"], "linear")
    merged = _merge(network, [gate, up], gate.name.replace("gate_proj", "gate_up_proj"))
    swiglu = Node("swiglu", silu.name, {"x": merged.outputs["out"]}, mul.outputs)
    network.replace_nodes([gate, up], [merged], at=gate)
    network.replace_nodes([silu, mul], [swiglu], at=mul)


def _merge(network: Network, parts: list[Node], name: str) -> Node:
    """One linear over the stacked rows of `parts`."""
    assert len({part.inputs["x"] for part in parts}) == 1, f"parts of {name} differ in their input"
    inputs = {"x": parts[0].inputs["x"]}
    for role in ("weight", "bias"):
        if role in parts[0].inputs:
            sources = [network.sources[part.inputs[role]] for part in parts]
            rows = [source for source in sources if isinstance(source, Rows)]
            stacked = Rows(tuple(p for source in rows for p in source.parts), rows[0].dtype)
            inputs[role] = network.add_weight(f"{name}.{role}", stacked).name
    width = network.tensors[inputs["weight"]].shape[0]
    tokens = network.tensors[inputs["x"]].shape[0]
    out = network.add_activation(f"{name}.out", network.dtype, (tokens, width))
    return Node("linear", name, inputs, {"out": out.name})


def _producer(network: Network, tensor: str, op: str) -> Node:
    """The `op` that writes `tensor`, which must have no other reader."""
    node = network.producer(tensor)
    assert node is not None and node.op == op, f"{tensor} does not come from {op}"
    assert len(network.consumers(tensor)) == 1, f"{tensor} has several readers"
    return node
