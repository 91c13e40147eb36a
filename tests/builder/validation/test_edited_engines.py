"""Plans that were edited are refused by name: the cases that once crashed, wrote other text, or
ended as a bug of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.hostile_engine import Edited, HostileEngine, refuse, write_text

WRITE, ATTEND = "layers.1.self_attn.attention.rope_kv_write", "layers.1.self_attn.attention"


def test_an_engine_that_nobody_edited_writes_its_text(
    engines: dict[str, tuple[HostileEngine, list[int]]], tmp_path: Path
) -> None:
    for kind, (engine, text) in engines.items():
        assert write_text(engine.write(tmp_path / kind)) == text
        assert len(set(text)) > 1, "the text would not show a change"


@pytest.mark.parametrize("layer", [-1, -1_000_000, 2, 10**6, 2**62])
@pytest.mark.parametrize("op", [WRITE, ATTEND])
def test_a_layer_outside_the_cache_is_refused(edited: Edited, op: str, layer: int) -> None:
    refuse(edited(lambda e: e.op(op)["attributes"].update(layer=layer)), "layer")


@pytest.mark.parametrize("layer", [2**70, 2**63, -(2**63) - 1, "1", 1.0, True, None, [1]])
def test_a_layer_that_is_no_number_of_64_bits_is_refused(edited: Edited, layer: Any) -> None:
    refuse(edited(lambda e: e.op(WRITE)["attributes"].update(layer=layer)), "layer|leaves 64 bits")


def test_the_least_number_of_64_bits_is_no_layer(edited: Edited) -> None:
    refuse(edited(lambda e: e.op(WRITE)["attributes"].update(layer=-(2**63))), "layer")


def test_a_layer_that_two_operators_name_is_refused(edited: Edited) -> None:
    refuse(edited(lambda e: e.op(WRITE)["attributes"].update(layer=0)), "layer 0; it is of 1")


def test_a_scale_of_two_elements_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        name = "model.layers.0.self_attn.qkv_proj.input_scale"
        engine.tensor(name)["shape"] = [2]

    refuse(edited(change), "has shape")


def test_a_scale_of_two_elements_for_the_product_alone_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        op = engine.op("layers.0.self_attn.qkv_proj")
        biases = next(t for t in engine.plan["tensors"] if t["shape"] == [32])
        op["inputs"]["x_scale"] = biases["name"]

    refuse(edited(change), "x_scale")


def test_rows_gathered_from_rows_are_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        gather = next(op for op in engine.plan["ops"] if op["op"] == "gather_rows")
        engine.tensor(gather["inputs"]["x"])["shape"][0] = "rows"

    refuse(edited(change), "has shape|arena_bytes")


@pytest.mark.parametrize("index", range(18))
def test_a_missing_operator_is_refused(edited: Edited, index: int) -> None:
    refuse(edited(lambda e: e.plan["ops"].pop(index)), ".")


@pytest.mark.parametrize("index", range(18))
def test_an_operator_that_runs_twice_is_refused(edited: Edited, index: int) -> None:
    refuse(edited(lambda e: e.plan["ops"].insert(index, e.plan["ops"][index])), ".")


def test_an_empty_plan_is_refused(edited: Edited) -> None:
    refuse(edited(lambda e: e.plan.update(ops=[])), "no operators")
    refuse(edited(lambda e: e.plan.update(ops=[], tensors=[], outputs={})), "no operators")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32", "int32", "evil"])
def test_a_cache_of_another_dtype_is_refused(edited: Edited, dtype: str) -> None:
    refuse(
        edited(lambda e: e.plan["kv_cache"].update(dtype=dtype)), "kv_cache_dtype|the KV cache is"
    )


@pytest.mark.parametrize("offset", [-64, -1, 1, 2**40, 2**62, None, "0"])
def test_an_absurd_place_in_the_arena_is_refused(edited: Edited, offset: object) -> None:
    name = "model.embed_tokens.out"
    refuse(edited(lambda e: e.tensor(name).update(offset=offset)), "lies at|arena_bytes|offset")


def test_two_values_in_one_place_are_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        norm = engine.op("layers.0.post_attention_layernorm")
        place = engine.tensor(norm["inputs"]["residual"])["offset"]
        engine.tensor(norm["inputs"]["x"])["offset"] = place

    refuse(edited(change), "is still needed|arena_bytes")


@pytest.mark.parametrize("size", [0, -64, 2**40, 2**62])
def test_an_arena_of_another_size_is_refused(edited: Edited, size: int) -> None:
    refuse(edited(lambda e: e.plan.update(arena_bytes=size)), "arena_bytes is")


@pytest.mark.parametrize("dtype", ["evil", "float64", "int32", "uint8", "bool", "", "__class__"])
def test_a_tensor_of_another_dtype_is_refused(edited: Edited, dtype: str) -> None:
    for name in ("model.embed_tokens.out", "model.embed_tokens.weight", "lm_head.out"):
        refuse(edited(lambda e, name=name: e.tensor(name).update(dtype=dtype)), ".")


@pytest.mark.parametrize("op", ["evil", "packed_linear", "tensorrt", "all_reduce", "", "add"])
def test_an_operator_that_the_backend_has_not_is_refused(edited: Edited, op: str) -> None:
    refuse(edited(lambda e: e.op("mlp.act").update(op=op)), ".")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 1),
        ("num_layers", 0),
        ("num_layers", 10**9),
        ("num_kv_heads", 0),
        ("num_kv_heads", 2),
        ("head_size", 0),
        ("head_size", -16),
        ("tokens_per_block", 0),
        ("tokens_per_block", -8),
        ("tokens_per_block", 16),
        ("windows", []),
        ("windows", [0, -1]),
        ("windows", [0, 5]),
        ("windows", [0, True]),
    ],
)
def test_a_cache_of_another_shape_is_refused(edited: Edited, field: str, value: object) -> None:
    refuse(edited(lambda e: e.plan["kv_cache"].update({field: value})), ".")


@pytest.mark.parametrize("limit", ["max_num_tokens", "max_num_rows"])
@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**62, 25])
def test_limits_of_another_size_are_refused(edited: Edited, limit: str, value: int) -> None:
    refuse(edited(lambda e: e.plan.update({limit: value})), ".")


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        (ATTEND, "window", -1),
        (ATTEND, "window", 3),
        (ATTEND, "sink_tokens", 2),
        (ATTEND, "softmax_scale", 0.5),
        (ATTEND, "num_kv_heads", 0),
        (ATTEND, "num_heads", 3),
        (WRITE, "head_size", 15),
        (WRITE, "head_size", 1024),
        (WRITE, "unknown", 1),
        ("post_attention_layernorm", "epsilon", 0.5),
        ("post_attention_layernorm", "epsilon", "1e-6"),
    ],
)
def test_an_attribute_that_the_model_has_not_is_refused(
    edited: Edited, op: str, name: str, value: object
) -> None:
    refuse(edited(lambda e: e.op(op)["attributes"].update({name: value})), ".")


def test_scales_that_belong_to_another_product_are_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        one = engine.op("layers.0.self_attn.qkv_proj")["inputs"]
        two = engine.op("layers.1.self_attn.qkv_proj")["inputs"]
        one["x_scale"], two["x_scale"] = two["x_scale"], one["x_scale"]

    refuse(edited(change), "quantized it")


def test_a_residual_of_another_place_is_refused(edited: Edited) -> None:
    def change(engine: HostileEngine) -> None:
        inputs = engine.op("layers.0.post_attention_layernorm")["inputs"]
        inputs["residual"] = inputs["x"]

    refuse(edited(change), "wanted stream")


def test_an_output_that_is_something_else_is_refused(edited: Edited) -> None:
    refuse(edited(lambda e: e.plan["outputs"].update(more="lm_head.out")), "output 'more'")
    refuse(edited(lambda e: e.plan["outputs"].update(logits="model.norm.out")), ".")
    refuse(edited(lambda e: e.plan["outputs"].update(hidden="lm_head.weight")), "'hidden'")
    refuse(edited(lambda e: e.plan.update(outputs={})), ".")
