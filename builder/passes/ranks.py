"""Sums over ranks and the gathered vocabulary, for backends whose kernels exchange numbers.

A projection back to the hidden dimension leaves float32 partial sums; all_reduce adds them over the
ranks, then scales, adds the bias and rounds, once, as one rank would. The output projection
computes a rank's share of the vocabulary; all_gather puts the shares side by side in rank 0.

Where a norm reads the sum alone, a backend that packs linears gets both as one operator.

With `sum_leaves` L these projections add K as L parts joined in a balanced tree, of which a rank
has a whole subtree, so that engines of every number of ranks give the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from llmctl.builder.models.decoder import LM_HEAD
from llmctl.builder.network import Attribute, Network, Node
from llmctl.builder.ranks import row_share
from llmctl.builder.schemes.reading import CodedRows
from llmctl.builder.sharding import SPLIT_COLUMNS, ColumnShard, RowShard
from llmctl.builder.sources import Source
from llmctl.errors import Unsupported
from llmctl.plugins.core.shares import share_of
from llmctl.plugins.fused.all_reduce_norm.spec import warps_of
from llmctl.plugins.ops.packed_linear.forms import few_tokens

_AFTER_SUM = ("weight_scale", "x_scale", "bias")


def split_over_ranks(
    network: Network, num_ranks: int, sum_leaves: int, *, is_packed: bool
) -> Network:
    """The network of one rank. is_packed: products are going to be packed ones, which leave the
    tree over a rank's own leaves to all_reduce, on one rank too. Raises Unsupported for per-token
    scales of a split input: no rank knows the largest value of a whole row."""
    split = network.copy()
    for node in network.nodes:
        if node.op != "linear":
            continue
        if node.name.endswith(SPLIT_COLUMNS):
            _split_sum(split, node, num_ranks, sum_leaves, is_packed=is_packed)
        elif node.name == LM_HEAD and num_ranks > 1:
            split_rows(split, node, num_ranks)
    split.prune()
    return split


def fuse_norms(network: Network) -> Network:
    """all_reduce then rms_norm(sum, residual) -> all_reduce_norm, where a kernel does it."""
    fused = network.copy()
    for total in [node for node in network.nodes if node.op == "all_reduce"]:
        if total.attributes["ranks"] == 1:  # the product behind it normalizes
            continue
        norm, *others = fused.consumers(total.outputs["out"])
        width = fused.tensors[total.outputs["out"]].shape[1]
        if others or norm.op != "rms_norm" or "out_scale" in norm.outputs:
            continue
        if "residual" not in norm.inputs or warps_of(int(width)) is None:
            continue
        inputs = {**total.inputs, "norm_weight": norm.inputs["weight"]}
        inputs |= {role: t for role, t in norm.inputs.items() if role in ("residual", "scale")}
        attributes = {**total.attributes, **norm.attributes}
        node = Node("all_reduce_norm", total.name, inputs, norm.outputs, attributes)
        fused.replace_nodes([total, norm], [node], at=norm)
    fused.prune()
    return fused


def keep_residuals(network: Network) -> Network:
    """A row's owner keeps the residual stream of sums where only the next such sum reads it."""
    kept = network.copy()
    for total in [node for node in network.nodes if node.op == "all_reduce_norm"]:
        stream = total.outputs.get("residual_out")
        readers = [] if stream is None else network.consumers(stream)
        if readers and all(_reads_residual_alone(node, stream) for node in readers):
            keeping = {**total.attributes, "keeps": 1}
            kept.replace_nodes([total], [replace(total, attributes=keeping)], at=total)
    return kept


def _reads_residual_alone(node: Node, stream: str | None) -> bool:
    roles = [role for role, name in node.inputs.items() if name == stream]
    return node.op == "all_reduce_norm" and roles == ["residual"]


def push_partial_sums(network: Network) -> Network:
    """Products of few tokens, whose tactics are chosen, hand their sums to the other ranks
    themselves, where a norm is taken into the sum over ranks."""
    pushed = network.copy()
    for total in [node for node in network.nodes if node.op == "all_reduce_norm"]:
        product = network.producer(total.inputs["x"])
        assert product is not None, "partial sums come from a product"
        most = few_tokens(product.tactic)
        if not most or total.attributes.get("leaves", 1) != 1:
            continue
        giving = {**product.attributes, "pushed_to": total.attributes["ranks"]}
        taking = {**total.attributes, "pushed": most}
        pushed.replace_nodes([product], [replace(product, attributes=giving)], at=product)
        pushed.replace_nodes([total], [replace(total, attributes=taking)], at=total)
    return pushed


def _split_sum(
    network: Network, node: Node, num_ranks: int, sum_leaves: int, *, is_packed: bool
) -> None:
    own = sum_leaves // num_ranks  # leaves of this rank
    leaves: dict[str, Attribute] = {"leaves": own} if sum_leaves > 1 else {}
    if num_ranks == 1 and not (leaves and is_packed):
        attributes = {**node.attributes, **leaves}
        network.replace_nodes([node], [replace(node, attributes=attributes)], at=node)
        return
    if "x_scale" in node.inputs and network.tensors[node.inputs["x_scale"]].shape != (1,):
        raise Unsupported(
            f"{'--tp-invariant' if leaves else f'--tp-size {num_ranks}'}: {node.name} quantizes "
            "each token by its largest value, of which a rank has a part",
            fix="quantize with static activation scales: llmctl quantize --qformat fp8",
        )
    out = network.tensors[node.outputs["out"]]
    tokens, width = out.shape
    assert isinstance(width, int)
    in_sum = own if is_packed and leaves else 1
    shape = (tokens, in_sum * width)
    partial = network.add_activation(f"{node.name}.partial", "float32", shape).name
    weight = node.inputs["weight"]
    source = network.sources[weight]
    if isinstance(source, CodedRows):
        columns = source.shape[1]
        del network.sources[weight]
        network.add_weight(weight, ColumnShard(source.widened(columns * num_ranks), columns))
    inputs = {role: node.inputs[role] for role in ("x", "weight")}
    after = {role: node.inputs[role] for role in _AFTER_SUM if role in node.inputs}
    product = replace(
        node,
        inputs=inputs,
        outputs={"out": partial},
        attributes={**node.attributes, "is_partial": True, **leaves},
    )
    total = Node(
        "all_reduce",
        f"{node.name}.all_reduce",
        {"x": partial, **after},
        node.outputs,
        {"ranks": num_ranks, **({"leaves": own} if in_sum > 1 else {})},
    )
    network.replace_nodes([node], [product, total], at=node)


def split_rows(network: Network, node: Node, num_ranks: int, *, to_all: bool = False) -> None:
    """A linear of which every rank computes a share of the rows, and the gathering behind it.
    to_all: other operators read what is gathered; else logits, which rank 0 alone samples from."""
    out = network.tensors[node.outputs["out"]]
    rows, width = out.shape
    assert isinstance(width, int)
    share = row_share(width, num_ranks)
    inputs = dict(node.inputs)
    for role in ("weight", "weight_scale", "bias"):
        if role in inputs:
            source: Source = network.sources[inputs[role]]
            if len(network.consumers(inputs[role])) == 1:  # else it is the embedding, too
                del network.sources[inputs[role]]
            part = RowShard(source, share)
            inputs[role] = network.add_weight(f"{node.name}.{role}", part).name
    own = network.add_activation(share_of(node.name), out.dtype, (rows, share)).name
    product = replace(node, inputs=inputs, outputs={"out": own})
    attributes: dict[str, Attribute] = {"ranks": num_ranks, **({"to_all": True} if to_all else {})}
    gathered = Node("all_gather", f"{node.name}.all_gather", {"x": own}, node.outputs, attributes)
    network.replace_nodes([node], [product, gathered], at=node)
