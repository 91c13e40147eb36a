"""The whole network as one piece: a contiguous KV cache, padded batches, acceptance inside.

Every sequence has a slot of max_seq_len positions in each layer's cache, which the plan updates in
place. Tokens stay packed in one axis everywhere except in attention.
"""

from __future__ import annotations

from dataclasses import replace

from llmctl.builder.config import BuildConfig
from llmctl.builder.engine_format import TENSORRT_OP, Dim, KvCacheSpec
from llmctl.builder.network import Network, Node
from llmctl.builder.tensorrt.pieces import STEP, Binding, Piece, as_row
from llmctl.errors import Unsupported
from llmctl.plugins.core.op_spec import FP8

WHOLE, TREE = "whole", "tree"


def make_whole(
    network: Network, cache: KvCacheSpec, limits: BuildConfig
) -> tuple[Network, tuple[Piece, ...]]:
    """(the network as one node, the piece; and one that verifies token trees, with drafts).

    Raises Unsupported for an FP8 cache, which TensorRT's cache layer does not take.
    """
    if cache.dtype == FP8:
        raise Unsupported(
            "--kv-cache-type continuous is refused with an FP8 KV cache: TensorRT updates caches "
            "in 16 bits only",
            fix="--kv-cache-dtype none, or --kv-cache-type paged",
        )
    pieces = [_piece(network, cache, limits, is_tree=False)]
    if limits.max_draft_len > 1 and not any(cache.windows):
        pieces.append(_piece(network, cache, limits, is_tree=True))
    whole = pieces[0]
    inputs = {b.name: b.name for b in whole.bindings if b.name in network.sources}
    inputs |= {name: STEP + name for name in whole.step}
    node = Node(TENSORRT_OP, "model", inputs, {"logits": network.logits}, {"piece": WHOLE})
    result = network.copy()
    result.nodes = [node]
    result.prune()
    return result, tuple(pieces)


def _piece(network: Network, cache: KvCacheSpec, limits: BuildConfig, is_tree: bool) -> Piece:
    nodes = tuple(_with_cache(node) for node in network.nodes)
    weights = [
        Binding(name, True, network.tensors[name].dtype, as_row(network.tensors[name].shape))
        for name in network.sources
    ]
    slots: tuple[Dim, ...] = ("batch", cache.num_kv_heads, limits.max_seq_len, cache.head_size)
    caches = [f"cache_{kind}_{layer}" for layer in range(cache.num_layers) for kind in "kv"]
    inputs = [Binding(name, True, cache.dtype, slots) for name in caches]
    outputs = [Binding(f"{name}_out", False, cache.dtype, slots, alias=name) for name in caches]
    step = _step(limits, network.dtype, is_tree)
    (vocab,) = network.tensors[network.logits].shape[1:]
    attention = [node for node in network.nodes if node.op == "paged_attention"]
    for node in attention:
        heads, size = int(node.attributes["num_heads"]), int(node.attributes["head_size"])
        shape: tuple[Dim, ...] = ("batch", heads, "length", size)
        outputs.append(Binding(f"query_{node.attributes['layer']}", False, network.dtype, shape))
    outputs += [
        Binding("logits", False, "float32", ("logits_rows", vocab)),
        *_accepted(limits, is_tree),
    ]
    return Piece(
        TREE if is_tree else WHOLE,
        nodes,
        {t.name: t for t in network.tensors.values()},
        (*weights, *inputs, *step, *outputs),
        tuple(binding.name for binding in step),
        outputs={"logits": network.logits},
        num_ranks=limits.tp_size,
    )


def _with_cache(node: Node) -> Node:
    """Attention's halves with the caches among their roles."""
    if node.op not in ("rope_kv_write", "paged_attention"):
        return node
    layer = node.attributes["layer"]
    before = {f"{kind}_cache": f"cache_{kind}_{layer}" for kind in "kv"}
    after = {role: f"{name}_out" for role, name in before.items()}
    if node.op == "rope_kv_write":
        return replace(node, inputs={**node.inputs, **before}, outputs={**node.outputs, **after})
    query = {"query": f"query_{layer}"}
    return replace(node, inputs={**node.inputs, **after}, outputs={**node.outputs, **query})


def _step(limits: BuildConfig, dtype: str, is_tree: bool) -> list[Binding]:
    """The arrays of a step. `logit_rows` are indices into batch * length."""
    tokens: tuple[Dim, ...] = ("batch", "length")
    shapes: dict[str, tuple[str, tuple[Dim, ...]]] = {
        "token_ids": ("int32", tokens),
        "position_ids": ("int32", tokens),
        "write_index": ("int32", ("batch",)),
        "logit_rows": ("int32", ("batch", "rows")),
    }
    if is_tree:
        shapes |= {
            "attention_mask": ("bool", ("batch", 1, "length", limits.max_seq_len)),
            "tree_tokens": ("int32", ("batch", "rows")),
            "parent": ("int32", ("batch", "rows")),
            "ancestors": (dtype, ("batch", "rows", "rows")),
        }
    else:
        shapes["kv_length"] = ("int32", ("batch",))
        if limits.max_draft_len:
            shapes["drafts"] = ("int32", ("batch", "drafts"))
    return [Binding(name, True, dtype, shape) for name, (dtype, shape) in shapes.items()]


def _accepted(limits: BuildConfig, is_tree: bool) -> list[Binding]:
    """Greedy acceptance inside the plan."""
    found = [Binding("tokens", False, "int32", ("batch", "rows"))]
    if limits.max_draft_len:
        found.append(Binding("accepted", False, "int32", ("batch", 1)))
        found.append(Binding("next_token", False, "int32", ("batch", 1)))
    if is_tree:
        found.append(Binding("node", False, "int32", ("batch", 1)))
    return found
