"""Draft heads of an engine of several ranks: each computes a share of the rows of every product.

Rows of a product are separate sums, so gathered results have the bits that one rank computes. All
operations between products are replicated on every rank:

    share = linear(x)            of a rank's rows
    out = all_gather(share)      in every rank; logits only where they are read whole

A rank's share of logits is an output, too: what lists the likeliest ids of all ranks reads it.

A recurrent head's state needs two products, W e and U s. Ranks add their rows of both, and the
state itself is gathered; U s goes to the next step as a share, for its own rank alone reads it:

    state = silu(W e + carry)    of a rank's rows
    out = [context; all_gather(state)]

A head that attends stays whole: rank 0 alone has its KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmctl.builder.network import OUTPUT_OP, Network, Node
from llmctl.builder.passes.ranks import split_rows
from llmctl.builder.plan import Dim
from llmctl.builder.ranks import divides_rows
from llmctl.plugins.core.shares import share_of


def split_heads(heads: Sequence[Network], num_ranks: int) -> list[Network]:
    """The heads of one rank."""
    if num_ranks == 1:
        return list(heads)
    states = {name for head in heads for name, given in head.inputs.items() if not given.source}
    return [head if head.cache else _split(head, states, num_ranks) for head in heads]


def _split(head: Network, states: set[str], num_ranks: int) -> Network:
    """states: names of outputs that a step hands to the next one."""
    split = head.copy()
    for node in head.nodes:
        if node.op != "linear":
            continue
        out = node.outputs["out"]
        is_logits = _is_logits(head, out, states)
        if is_logits or divides_rows(int(head.tensors[out].shape[1]), num_ranks):
            split_rows(split, node, num_ranks, to_all=not is_logits)
    _put_out_shares(split, states)
    for node in [node for node in split.nodes if node.op == "recurrence"]:
        _share_state(split, node)
    for name in states & set(split.outputs):
        _keep_share(split, name)
    split.prune()
    return split


def _is_logits(head: Network, tensor: str, states: set[str]) -> bool:
    """Whether the runtime alone reads it, and does not hand it on."""
    readers = head.consumers(tensor)
    return all(reader.op == OUTPUT_OP and reader.name not in states for reader in readers)


def _put_out_shares(network: Network, states: set[str]) -> None:
    """Of every output of logits."""
    for name, found in list(network.outputs.items()):
        gathered = network.producer(found.tensor)
        if name not in states and gathered is not None and gathered.op == "all_gather":
            network.outputs[share_of(name)] = replace(found, tensor=gathered.inputs["x"])


def _share_state(network: Network, node: Node) -> None:
    """Add and activate a rank's share of what enters the state, and gather that."""
    gathered = network.producer(node.inputs["x"])
    if gathered is None or gathered.op != "all_gather":
        return  # the sum of embeddings, or rows that do not divide
    if "carry" not in node.inputs and not node.attributes["silu"]:
        return  # the state is the product
    own = network.tensors[gathered.inputs["x"]]
    carry = node.inputs.get("carry")
    if carry is not None:
        carry = _share_input(network, carry, own.shape[1])
    name = share_of(node.name)
    state = network.add_activation(name, own.dtype, own.shape).name
    parts = {"x": own.name, **({} if carry is None else {"carry": carry})}
    nodes = [
        replace(node, name=name, inputs=parts, outputs={"state": state}),
        replace(gathered, name=f"{name}.all_gather", inputs={"x": state}),
        replace(
            node,
            inputs={role: node.inputs[role] for role in ("x", "context")},
            attributes={"silu": False},
        ),
    ]
    network.replace_nodes([gathered, node], nodes, at=node)


def _share_input(network: Network, tensor: str, share: Dim) -> str:
    """The input of the graph, of which a rank is given its own columns."""
    (name,) = [name for name, given in network.inputs.items() if given.tensor == tensor]
    known = network.tensors[tensor]
    made = network.add_activation(share_of(tensor), known.dtype, (known.shape[0], share)).name
    network.inputs[name] = replace(network.inputs[name], tensor=made)
    return made


def _keep_share(network: Network, name: str) -> None:
    """Hand on a rank's own rows of a product, where the next step takes them."""
    found = network.outputs[name]
    gathered = network.producer(found.tensor)
    if gathered is None or gathered.op != "all_gather":
        return
    network.nodes = [node for node in network.nodes if node is not gathered]
    network.outputs[name] = replace(found, tensor=gathered.inputs["x"])
