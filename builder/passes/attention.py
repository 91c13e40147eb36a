"""gpt_attention becomes two launches: rope_kv_write, then paged_attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmctl.builder.network import Network, Node
from llmctl.builder.sources import LargestScale, RotaryTable
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens

# Attributes of each half, as the plugins' specs list them.
_WRITE = ("layer", "num_heads", "num_kv_heads", "head_size", "epsilon")
_ATTEND = ("layer", "num_heads", "num_kv_heads", "head_size", "softmax_scale", "window")
ROTARY = "rotary"


def lower_attention(
    network: Network,
    rotary: RotaryTable,
    kv_scales: Sequence[tuple[str, str]] | None,
    *,
    fp8_tokens: Fp8Tokens = Fp8Tokens.NONE,
) -> Network:
    """Split every gpt_attention. kv_scales: (K, V) checkpoint scale names per layer, None if the
    cache has the model dtype. A window larger than max_seq_len is full attention. fp8_tokens:
    whose attention has FP8 products."""
    lowered = network.copy()
    lowered.add_weight(ROTARY, rotary)
    for node in network.nodes:
        if node.op == "gpt_attention":
            layer = node.attributes["layer"]
            assert isinstance(layer, int)
            names = kv_scales[layer] if kv_scales is not None else None
            parts = _split(lowered, node, rotary.positions, names, fp8_tokens.attributes)
            lowered.replace_nodes([node], parts, at=node)
    lowered.prune()
    return lowered


def _split(
    network: Network,
    node: Node,
    max_seq_len: int,
    scale_names: tuple[str, str] | None,
    kind: Mapping[str, bool],
) -> list[Node]:
    scales = {}
    if scale_names is not None:
        for role, name in zip(("k_scale", "v_scale"), scale_names, strict=True):
            scales[role] = network.add_weight(f"{node.name}.{role}", LargestScale((name,))).name
    out = network.tensors[node.outputs["out"]]
    q = network.add_activation(f"{node.name}.q", network.dtype, out.shape).name
    attributes = dict(node.attributes)
    if int(attributes["window"]) >= max_seq_len:
        attributes["window"] = 0
    norms = {r: node.inputs[r] for r in ("q_norm", "k_norm") if r in node.inputs}
    write = Node(
        "rope_kv_write",
        f"{node.name}.rope_kv_write",
        {"qkv": node.inputs["qkv"], "rotary": ROTARY, **norms, **scales},
        {"q": q},
        {key: attributes[key] for key in _WRITE},
    )
    attend = Node(
        "paged_attention",
        node.name,
        {"q": q, **scales},
        node.outputs,
        {**{key: attributes[key] for key in _ATTEND}, **kind},
    )
    return [write, attend]
