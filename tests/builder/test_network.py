"""Who writes and who reads a tensor, however a network was rewritten."""

from __future__ import annotations

import random

from llmctl.builder.network import OUTPUT_OP, Network, Node, Output


def chain(length: int) -> Network:
    """Each node reads what the one before writes, and every third tensor too."""
    nodes = [
        Node("op", f"n{i}", {"x": f"t{i}", "y": f"t{i // 3 * 3}"}, {"out": f"t{i + 1}"})
        for i in range(length)
    ]
    return Network("float32", nodes=nodes, outputs={"logits": Output(f"t{length}")})


def require_right_answers(network: Network) -> None:
    """Those of looking through all nodes."""
    names = {t for n in network.nodes for t in (*n.inputs.values(), *n.outputs.values())}
    for name in (*names, "nobody's"):
        writers = [node for node in network.nodes if name in node.outputs.values()]
        assert network.producer(name) is (writers[0] if writers else None)
        readers = [node for node in network.nodes if name in node.inputs.values()]
        found = network.consumers(name)
        assert len(found) == len(readers) + (network.outputs["logits"].tensor == name)
        assert all(a is b for a, b in zip(found, readers, strict=False))
        assert all(node.op == OUTPUT_OP for node in found[len(readers) :])


def test_answers_are_right_after_any_rewriting() -> None:
    draw = random.Random(5)
    for length in (1, 5, 300):
        network = chain(length)
        require_right_answers(network)
        for step in range(25):
            first = draw.randrange(len(network.nodes))
            old = [network.nodes[first]]
            if draw.random() < 0.5:  # neighbours, or nodes that are far apart
                old.append(draw.choice(network.nodes))
            at = draw.choice(old)
            new = [
                Node(
                    "new",
                    f"s{step}.{i}",
                    {"x": draw.choice(old).inputs["x"]},
                    {"out": f"s{step}.{i}"},
                )
                for i in range(draw.randrange(1, 3))
            ]
            expected = [n for n in network.nodes if not any(n is o for o in old) or n is at]
            place = next(i for i, node in enumerate(expected) if node is at)
            expected[place : place + 1] = new
            before = network.copy()
            network.replace_nodes(old, new, at)
            assert all(a is b for a, b in zip(network.nodes, expected, strict=True))
            require_right_answers(network)
            assert len(before.nodes) != len(network.nodes) or before.nodes != network.nodes
            require_right_answers(before)


def test_nodes_that_are_added_or_redirected_are_known() -> None:
    network = chain(4)
    assert [node.name for node in network.consumers("t1")] == ["n1"]
    network.nodes.append(Node("op", "late", {"x": "t1"}, {"out": "l"}))
    assert [node.name for node in network.consumers("t1")] == ["n1", "late"]
    network.nodes[-1] = Node("op", "later", {"x": "t2"}, {"out": "l"})
    assert [node.name for node in network.consumers("t1")] == ["n1"]
    network.redirect("t1", "t0")
    assert not network.consumers("t1")
    require_right_answers(network)
