"""After the last attention, compute only the rows that get logits.

After the last attention every op works row by row, so the gather moves up to it: of a prompt
chunk of 2,048 tokens, the last layer's output projection and MLP run for one row. Rows are
gathered in the model dtype, so the last attention does not write FP8 itself, unless
`quantize_before_gather` (fuse.py) follows.
"""

from __future__ import annotations

from dataclasses import replace

from llmctl.builder.network import Network, Node


def hoist_gather(network: Network) -> Network:
    """Move the one gather_rows up to the tensors that some attention needs for all tokens. Without
    attention it stays where it was recorded; a head may attend and gather nothing."""
    hoisted = network.copy()
    gathers = [node for node in hoisted.nodes if node.op == "gather_rows"]
    if not any(node.op == "gpt_attention" for node in hoisted.nodes) or not gathers:
        return hoisted
    (gather,) = gathers
    rows = hoisted.tensors[gather.outputs["out"]].shape[0]
    hoisted.nodes = [node for node in hoisted.nodes if node is not gather]
    hoisted.redirect(gather.outputs["out"], gather.inputs["x"])

    all_tokens = _needed_for_all_tokens(hoisted)
    written_for_all = {t for n in hoisted.nodes if n.name in all_tokens for t in n.outputs.values()}
    given = (found.tensor for found in hoisted.inputs.values())
    written_for_all |= {t for t in given if hoisted.tensors[t].shape[0] == "tokens"}
    gathered: dict[str, str] = {}
    rewritten: list[Node] = []
    for node in hoisted.nodes:
        if node.name in all_tokens:
            rewritten.append(node)
            continue
        inputs = dict(node.inputs)
        for role, tensor in node.inputs.items():
            if tensor not in written_for_all:
                continue
            if tensor not in gathered:
                source = hoisted.tensors[tensor]
                name = f"{tensor.removesuffix('.out')}.gather_rows"
                out = hoisted.add_activation(f"{name}.out", source.dtype, (rows, source.shape[1]))
                rewritten.append(Node("gather_rows", name, {"x": tensor}, {"out": out.name}))
                gathered[tensor] = out.name
            inputs[role] = gathered[tensor]
        for tensor in node.outputs.values():
            known = hoisted.tensors[tensor]
            hoisted.tensors[tensor] = replace(known, shape=(rows, *known.shape[1:]))
        rewritten.append(replace(node, inputs=inputs))
    hoisted.nodes = rewritten
    hoisted.prune()
    return hoisted


def mark_ends(network: Network) -> Network:
    """Tell the attention whose outputs are gathered, and nothing else, that nobody reads the others
    (`ends_only`). Behind all passes that move what reads it."""
    marked = network.copy()
    given = {found.tensor for found in network.outputs.values()}
    for node in network.nodes:
        if node.op != "paged_attention" or node.outputs["out"] in given:
            continue
        readers = marked.consumers(node.outputs["out"])
        if readers and all(reader.op == "gather_rows" for reader in readers):
            attributes = {**node.attributes, "ends_only": True}
            marked.replace_nodes([node], [replace(node, attributes=attributes)], at=node)
    return marked


def _needed_for_all_tokens(network: Network) -> set[str]:
    """Names of the attention nodes, of what computes outputs for all tokens, and of everything
    they are computed from."""
    needed: set[str] = set()
    wanted = {found.tensor for found in network.outputs.values() if found.for_all_tokens}
    for node in reversed(network.nodes):
        if node.op == "gpt_attention" or wanted.intersection(node.outputs.values()):
            needed.add(node.name)
            wanted.update(node.inputs.values())
    return needed
