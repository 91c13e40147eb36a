"""Each pass on a recorded network: what it rewrites, and what it leaves alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.builder.engine_format import KvCacheSpec, Plan
from llmctl.builder.models import model_config
from llmctl.builder.models.decoder import build_network
from llmctl.builder.network import Network, Node
from llmctl.builder.passes.attention import lower_attention
from llmctl.builder.passes.fuse import (
    fuse_embedding,
    fuse_quantize,
    fuse_residual,
    quantize_before_gather,
)
from llmctl.builder.passes.gather import hoist_gather
from llmctl.builder.passes.lower import lower
from llmctl.builder.passes.memory import ITEM_BYTES, plan_memory
from llmctl.builder.passes.merge import merge_linears
from llmctl.builder.passes.pack import pack_linears
from llmctl.builder.passes.quantize import LinearScales, quantize_linears
from llmctl.builder.passes.tactics import choose_tactics
from llmctl.builder.sources import RotaryTable
from llmctl.errors import Unsupported

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def record(**fields: Any) -> Network:
    return build_network(model_config({**CONFIG, **fields}, "config.json"), "bfloat16")


def all_scales(is_static: bool = True, layers: int = 3) -> dict[str, LinearScales]:
    return {
        module: LinearScales(
            f"{module}.weight_scale", f"{module}.input_scale" if is_static else None
        )
        for layer in range(layers)
        for module in (f"model.layers.{layer}.{name}" for name in LINEARS)
    }


def ops(network: Network) -> list[str]:
    return [node.op for node in network.nodes]


def finish(network: Network, scales: dict[str, LinearScales] | None = None) -> Network:
    rope = model_config(CONFIG, "config.json").rope
    network = fuse_residual(hoist_gather(merge_linears(network)))
    network = quantize_linears(network, scales or {})
    return fuse_quantize(lower_attention(network, RotaryTable(rope, 64, 8), None))


def test_the_recorded_network_is_unfused() -> None:
    layer = ["rms_norm", "linear", "linear", "linear", "gpt_attention", "linear", "add"]
    layer += ["rms_norm", "linear", "linear", "silu", "mul", "linear", "add"]
    assert ops(record()) == ["embedding", *3 * layer, "gather_rows", "rms_norm", "linear"]


def test_a_pass_leaves_its_input_alone() -> None:
    network = record()
    before = str(network)
    finish(network, all_scales())
    assert str(network) == before


def test_merge_stacks_rows_in_order() -> None:
    merged = merge_linears(record(num_hidden_layers=1, attention_bias=True))
    prefix = "model.layers.0"
    names = [f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv"]
    source = merged.sources[f"{prefix}.self_attn.qkv_proj.weight"]
    assert source.names == tuple(names) and source.shape == (32 + 2 * 16, 32)
    assert merged.sources[f"{prefix}.self_attn.qkv_proj.bias"].shape == (64,)
    assert merged.sources[f"{prefix}.mlp.gate_up_proj.weight"].shape == (96, 32)
    assert "silu" not in ops(merged) and ops(merged).count("swiglu") == 1
    assert not set(names) & set(merged.sources)


def test_only_the_last_layer_after_attention_works_on_rows() -> None:
    hoisted = hoist_gather(merge_linears(record()))
    on_rows = [n for n in hoisted.nodes if hoisted.tensors[n.outputs["out"]].shape[0] == "rows"]
    layer = ["gather_rows", "linear", "gather_rows", "add", "rms_norm", "linear", "swiglu"]
    assert [n.op for n in on_rows] == [*layer, "linear", "add", "rms_norm", "linear"]
    gathered = [n.inputs["x"] for n in on_rows if n.op == "gather_rows"]
    prefix = "model.layers"
    assert gathered == [f"{prefix}.2.self_attn.attention.out", f"{prefix}.1.mlp_residual.out"]


def test_residual_sums_are_fused_and_kept_only_where_read_again() -> None:
    fused = fuse_residual(hoist_gather(merge_linears(record())))
    assert "add" not in ops(fused)
    norms = [node for node in fused.nodes if node.op == "rms_norm"]
    assert ["residual" in node.inputs for node in norms] == [False] + [True] * 6
    assert ["residual_out" in node.outputs for node in norms] == [False] + [True] * 5 + [False]


def test_static_quantization_ends_up_in_the_producers() -> None:
    network = finish(record(), all_scales())
    assert [n.name for n in network.nodes if n.op == "quantize"] == [
        "model.layers.2.self_attn.o_proj.quantize"  # after the gather of the wanted rows
    ]
    norm = next(n for n in network.nodes if n.name == "model.layers.1.input_layernorm")
    assert network.tensors[norm.outputs["out"]].dtype == "float8_e4m3fn"
    assert norm.inputs["scale"] == "model.layers.1.self_attn.qkv_proj.input_scale"
    attention = next(n for n in network.nodes if n.op == "paged_attention")
    assert attention.inputs["out_scale"] == "model.layers.0.self_attn.o_proj.input_scale"


def test_the_last_attention_quantizes_too_once_its_rows_are_gathered_as_fp8() -> None:
    apart = finish(record(), all_scales())
    fused = fuse_quantize(quantize_before_gather(apart))
    assert "quantize" not in ops(fused)
    attention = [node for node in fused.nodes if node.op == "paged_attention"][-1]
    gather, linear = fused.nodes[fused.nodes.index(attention) + 1 :][:2]
    assert attention.inputs["out_scale"] == "model.layers.2.self_attn.o_proj.input_scale"
    assert gather.op == "gather_rows" and gather.inputs["x"] == attention.outputs["out"]
    assert linear.inputs["x"] == gather.outputs["out"]
    found = [fused.tensors[node.outputs["out"]] for node in (attention, gather)]
    assert [x.dtype for x in found] == ["float8_e4m3fn"] * 2
    assert [x.shape[0] for x in found] == ["tokens", "rows"]


@pytest.mark.parametrize("why", ["scales of tokens", "another reader"])
def test_a_quantization_stays_behind_the_gather_where_it_must(why: str) -> None:
    network = finish(record(), all_scales(is_static=why != "scales of tokens"))
    if why == "another reader":
        (gather,) = [n for n in network.nodes if n.name.endswith("attention.gather_rows")]
        network.add_activation("other", "float32", ("rows", 32))
        network.nodes.append(Node("gather_rows", "o", dict(gather.inputs), {"out": "other"}))
    assert str(quantize_before_gather(network)) == str(network)


def test_attention_cannot_quantize_per_token_itself() -> None:
    network = finish(record(), all_scales(is_static=False))
    apart = [node.name for node in network.nodes if node.op == "quantize"]
    assert apart == [f"model.layers.{layer}.self_attn.o_proj.quantize" for layer in range(3)]
    norm = next(n for n in network.nodes if n.name == "model.layers.1.input_layernorm")
    assert network.tensors[norm.outputs["out_scale"]].shape == ("tokens",)


def test_a_value_with_another_reader_is_not_fused() -> None:
    network = finish(record(num_hidden_layers=1))
    norm = next(n for n in network.nodes if n.op == "rms_norm")
    x, width = norm.outputs["out"], 32
    for name in ("a", "b"):
        network.add_activation(name, "float8_e4m3fn", ("tokens", width))
        network.nodes.append(Node("quantize", name, {"x": x}, {"out": name}))
    assert ops(fuse_quantize(network)).count("quantize") == 2


def test_parts_quantized_differently_are_refused() -> None:
    scales = all_scales()
    del scales["model.layers.1.self_attn.k_proj"]
    with pytest.raises(Unsupported, match="layers.1.self_attn.q_proj.*quantized differently"):
        quantize_linears(merge_linears(record()), scales)


def test_attention_becomes_a_write_and_a_read_of_the_cache() -> None:
    rope = model_config(CONFIG, "x").rope
    lowered = lower_attention(
        merge_linears(record()),
        RotaryTable(rope, 64, 8),
        [("k0", "v0"), ("k1", "v1"), ("k2", "v2")],
    )
    write = next(n for n in lowered.nodes if n.op == "rope_kv_write")
    read = next(n for n in lowered.nodes if n.op == "paged_attention")
    assert set(write.inputs) == {"qkv", "rotary", "k_scale", "v_scale"}
    assert write.inputs["k_scale"] == read.inputs["k_scale"]
    assert lowered.sources[read.inputs["v_scale"]].names == ("v0",)
    assert read.attributes["softmax_scale"] == pytest.approx(8**-0.5)


def test_a_window_longer_than_every_sequence_is_full_attention() -> None:
    fields = {"architectures": ["MistralForCausalLM"]}
    for window, wanted in ((63, 63), (64, 0)):
        network = merge_linears(record(**fields, sliding_window=window))
        rope = model_config(CONFIG, "x").rope
        lowered = lower_attention(network, RotaryTable(rope, 64, 8), None)
        read = next(n for n in lowered.nodes if n.op == "paged_attention")
        assert read.attributes["window"] == wanted


def test_tactics_are_named_by_op_and_type() -> None:
    network = choose_tactics(finish(record(), all_scales()), "cpu")
    tactics = {node.tactic for node in network.nodes}
    assert {"cpu.linear.fp8", "cpu.linear.bf16", "cpu.paged_attention.bf16"} <= tactics


def test_the_printed_network_is_one_line_a_node() -> None:
    lines = str(choose_tactics(finish(record()), "cpu")).splitlines()
    assert lines[0] == (
        "model.embed_tokens.out:bfloat16[tokens, 32] = "
        "embedding(weight=model.embed_tokens.weight)  [cpu.embedding.bf16]"
    )
    assert "layer=0 num_heads=4" in next(line for line in lines if "rope_kv_write(" in line)


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
    assert network.output in holder


def test_a_deep_network_needs_no_more_memory_than_a_shallow_one() -> None:
    sizes = [plan_memory(finish(record(num_hidden_layers=n)), 512, 8, 64)[1] for n in (3, 12)]
    assert sizes[0] == sizes[1]


def test_the_plan_survives_json() -> None:
    cache = KvCacheSpec(3, 2, 8, 32, "bfloat16", (0, 0, 0))
    plan = lower(choose_tactics(finish(record(), all_scales()), "cpu"), cache, 64, 8, 64)
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["logits"] == "lm_head.out"
