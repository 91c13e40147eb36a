"""Each pass on a recorded network: what it rewrites, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.passes import CONFIG, all_scales, finish, ops, record

from llmctl.builder.models import model_config
from llmctl.builder.network import Node
from llmctl.builder.passes.attention import lower_attention
from llmctl.builder.passes.fuse import (
    fuse_quantize,
    fuse_residual,
    quantize_before_gather,
)
from llmctl.builder.passes.gather import hoist_gather, mark_ends
from llmctl.builder.passes.merge import merge_linears
from llmctl.builder.passes.quantize import quantize_linears
from llmctl.builder.passes.tactics import choose_tactics
from llmctl.builder.sources import RotaryTable
from llmctl.errors import Unsupported


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


def test_the_attention_that_only_gathers_read_is_told_so() -> None:
    fused = mark_ends(fuse_quantize(quantize_before_gather(finish(record(), all_scales()))))
    told = [n.attributes.get("ends_only") for n in fused.nodes if n.op == "paged_attention"]
    assert told == [None, None, True]


def test_no_attention_is_told_so_whose_outputs_leave_the_network() -> None:
    network = finish(record())
    last = [node for node in network.nodes if node.op == "paged_attention"][-1]
    network.outputs["features"] = replace(
        next(iter(network.outputs.values())), tensor=last.outputs["out"], for_all_tokens=True
    )
    told = [n.attributes.get("ends_only") for n in mark_ends(network).nodes]
    assert not any(told)
