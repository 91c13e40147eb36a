"""Passes for packed products, the placing of activations, and the plan as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.passes import all_scales, finish, ops, record

from llmctl.builder.engine_format import KvCacheSpec, Plan
from llmctl.builder.network import Node
from llmctl.builder.passes.fuse import (
    fuse_embedding,
)
from llmctl.builder.passes.lower import lower
from llmctl.builder.passes.memory import ITEM_BYTES, plan_memory
from llmctl.builder.passes.pack import pack_linears
from llmctl.builder.passes.tactics import choose_tactics

# A Llama 3.2 1B of two layers: its sizes have measured products that normalize.
MEASURED = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_norms_become_part_of_the_products_that_were_measured_to_be_faster_with_them() -> None:
    network = pack_linears(finish(record(**MEASURED), all_scales(layers=2)))
    norms = [node.name for node in network.nodes if node.op == "rms_norm"]
    assert norms == ["model.layers.0.input_layernorm", "model.norm"]  # no residual; no such product
    with_norm = [node for node in network.nodes if "norm_weight" in node.inputs]
    assert [node.op for node in with_norm] == [
        "packed_linear_swiglu",
        "packed_linear_rope_kv",
        "packed_linear_swiglu",
    ]
    for node in choose_tactics(network, "cuda").nodes:
        assert ("+norm" in node.tactic) == ("norm_weight" in node.inputs), node.name
    offsets, _ = plan_memory(network, 16, 4, 128)
    for node in with_norm:  # all thread blocks read the residual while one writes the sum
        if "residual_out" in node.outputs:
            assert offsets[node.inputs["residual"]] != offsets[node.outputs["residual_out"]]


def test_norms_stay_apart_where_products_cannot_take_them() -> None:
    per_token = pack_linears(finish(record(**MEASURED), all_scales(is_static=False, layers=2)))
    small = pack_linears(finish(record(), all_scales()))
    for network in (per_token, small):
        assert not any("norm_weight" in node.inputs for node in network.nodes)


@pytest.mark.parametrize("is_static", [True, False])
def test_the_first_norm_becomes_part_of_the_embedding(is_static: bool) -> None:
    before = finish(record(), all_scales(is_static))
    network = fuse_embedding(before)
    first, second = network.nodes[:2]
    assert (first.op, second.op) == ("embedding_norm", "linear")
    embedding, norm = before.nodes[:2]
    assert first.outputs == {"embedded": embedding.outputs["out"], **norm.outputs}
    assert first.inputs["weight"] == embedding.inputs["weight"]
    assert first.inputs["norm_weight"] == norm.inputs["weight"]
    assert first.inputs.get("scale") == norm.inputs.get("scale")
    assert first.attributes == norm.attributes
    assert network.nodes[1:] == before.nodes[2:]
    assert set(network.tensors) == set(before.tensors)
    assert fuse_embedding(network).nodes == network.nodes


def test_an_embedding_that_something_else_reads_first_stays_apart() -> None:
    before = finish(record())
    embedding = before.nodes[0]
    early = Node("gather_rows", "early", {"x": embedding.outputs["out"]}, {"out": "kept"})
    before.nodes.insert(1, early)
    assert ops(fuse_embedding(before)) == ops(before)


@given(
    layers=st.integers(1, 4),
    tokens=st.integers(1, 300),
    rows=st.integers(1, 40),
    scaling=st.sampled_from(["none", "static", "dynamic"]),
    alignment=st.sampled_from([64, 128]),
)
def test_tensors_that_live_together_never_share_bytes(
    layers: int, tokens: int, rows: int, scaling: str, alignment: int
) -> None:
    scales = {} if scaling == "none" else all_scales(scaling == "static", layers)
    network = finish(record(num_hidden_layers=layers), scales)
    offsets, arena_bytes = plan_memory(network, tokens, rows, alignment)

    def place(name: str) -> tuple[int, int]:
        size = {"tokens": tokens, "rows": rows}
        num_bytes = ITEM_BYTES[network.tensors[name].dtype]
        for dim in network.tensors[name].shape:
            num_bytes *= size[dim] if isinstance(dim, str) else dim
        return offsets[name], offsets[name] + num_bytes

    # Replay: a value must still be there when it is read.
    holder: dict[str, tuple[int, int]] = {}
    for node in network.nodes:
        for name in node.inputs.values():
            assert name in network.sources or name in holder, f"{name} was overwritten"
        for role, name in node.outputs.items():
            start, stop = place(name)
            assert start % alignment == 0 and stop <= arena_bytes
            for other, (first, last) in list(holder.items()):
                if start < last and first < stop:
                    is_in_place = role == "residual_out" and other == node.inputs["residual"]
                    assert is_in_place or other not in node.inputs.values(), (node.name, other)
                    assert other not in node.outputs.values()
                    del holder[other]
            holder[name] = (start, stop)
    assert network.logits in holder


def test_a_deep_network_needs_no_more_memory_than_a_shallow_one() -> None:
    sizes = [plan_memory(finish(record(num_hidden_layers=n)), 512, 8, 64)[1] for n in (3, 12)]
    assert sizes[0] == sizes[1]


def test_the_plan_survives_json() -> None:
    cache = KvCacheSpec(3, 2, 8, 32, "bfloat16", (0, 0, 0))
    plan = lower(choose_tactics(finish(record(), all_scales()), "cpu"), cache, 64, 8, 64)
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["outputs"] == {"logits": "lm_head.out"}
