"""Fuse adjacent nodes into the operator that does both: SiLU and residual, residual and norm,
producer and quantization, embedding and norm; and reorder nodes so that they can be fused."""

from __future__ import annotations

from dataclasses import replace

from llmctl.builder.network import Network, Node

# op -> (role of the static scale, whether it can quantize per token)
QUANTIZING_OPS = {
    "rms_norm": ("scale", True),
    "swiglu": ("scale", True),
    "paged_attention": ("out_scale", False),
}


def fuse_silu(network: Network) -> Network:
    """add(silu(x), residual) -> silu(x, residual), where nothing else reads silu(x)."""
    fused = network.copy()
    for add in [node for node in network.nodes if node.op == "add"]:
        silu = fused.producer(add.inputs["x"])
        if silu is None or silu.op != "silu" or len(fused.consumers(add.inputs["x"])) != 1:
            continue
        inputs = {**silu.inputs, "residual": add.inputs["residual"]}
        node = replace(silu, inputs=inputs, outputs=add.outputs)
        fused.replace_nodes([silu, add], [node], at=add)
    fused.prune()
    return fused


def fuse_residual(network: Network) -> Network:
    """add(x, residual) then rms_norm(sum) -> rms_norm(x, residual), which also writes the sum.

    The sum is written only if something else reads it. A sum that no norm reads first stays.
    """
    fused = network.copy()
    for add in [node for node in network.nodes if node.op == "add"]:
        total = add.outputs["out"]
        readers = fused.consumers(total)
        norm = readers[0]
        if norm.op != "rms_norm":
            continue
        outputs = dict(norm.outputs)
        if len(readers) > 1:
            outputs["residual_out"] = total
        node = replace(norm, inputs={**norm.inputs, **_current(fused, add).inputs}, outputs=outputs)
        fused.replace_nodes([_current(fused, add), norm], [node], at=norm)
    fused.prune()
    return fused


def fuse_quantize(network: Network, ops: frozenset[str] = frozenset(QUANTIZING_OPS)) -> Network:
    """Let `ops` write FP8 if their only reader is a quantize node they can absorb."""
    fused = network.copy()
    for quantize in [node for node in network.nodes if node.op == "quantize"]:
        value = quantize.inputs["x"]
        producer = fused.producer(value)
        if producer is None or producer.op not in ops or len(fused.consumers(value)) != 1:
            continue
        role, is_per_token_able = QUANTIZING_OPS[producer.op]
        if "scale" not in quantize.inputs and not is_per_token_able:
            continue
        inputs = dict(producer.inputs)
        if "scale" in quantize.inputs:
            inputs[role] = quantize.inputs["scale"]
        outputs = {**producer.outputs, **quantize.outputs}
        node = replace(producer, inputs=inputs, outputs=outputs)
        fused.replace_nodes([producer, quantize], [node], at=producer)
    fused.prune()
    return fused


def fuse_embedding(network: Network) -> Network:
    """embedding then rms_norm -> embedding_norm, which writes the embedding too: a residual. Of
    several readers the norm must be the first."""
    fused = network.copy()
    for embedding in [node for node in network.nodes if node.op == "embedding"]:
        norm, *others = fused.consumers(embedding.outputs["out"])
        if not others:  # then it is no residual, and nothing would read it
            continue
        if norm.op != "rms_norm" or "residual" in norm.inputs or "residual_out" in norm.outputs:
            continue
        inputs = {role: name for role, name in norm.inputs.items() if role == "scale"}
        inputs |= {"weight": embedding.inputs["weight"], "norm_weight": norm.inputs["weight"]}
        outputs = {"embedded": embedding.outputs["out"], **norm.outputs}
        node = replace(
            norm, op="embedding_norm", name=embedding.name, inputs=inputs, outputs=outputs
        )
        fused.replace_nodes([embedding, norm], [node], at=embedding)
    fused.prune()
    return fused


def quantize_before_gather(network: Network) -> Network:
    """quantize(gather_rows(x)) -> gather_rows(quantize(x)) after attention, with one scale for all
    rows: the same numbers, and attention may then write FP8 in every layer."""
    moved = network.copy()
    for quantize in [node for node in network.nodes if node.op == "quantize"]:
        gather = moved.producer(quantize.inputs["x"])
        if gather is None or gather.op != "gather_rows" or "scale" not in quantize.inputs:
            continue
        value = gather.inputs["x"]
        source = moved.producer(value)
        readers = moved.consumers(value) + moved.consumers(gather.outputs["out"])
        if source is None or source.op != "paged_attention" or readers != [gather, quantize]:
            continue
        whole, out = moved.tensors[value], quantize.outputs["out"]
        tokens = moved.add_activation(f"{quantize.name}.x", moved.tensors[out].dtype, whole.shape)
        first = replace(
            quantize, inputs={**quantize.inputs, "x": value}, outputs={"out": tokens.name}
        )
        then = replace(gather, inputs={"x": tokens.name}, outputs={"out": out})
        moved.replace_nodes([gather, quantize], [first, then], at=quantize)
    moved.prune()
    return moved


def _current(network: Network, node: Node) -> Node:
    """The node of that name as earlier rewrites left it."""
    return next(found for found in network.nodes if found.name == node.name)
