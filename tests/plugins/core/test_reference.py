"""The references against code we did not write: torch and transformers modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from llmctl.errors import CorruptEngine
from llmctl.plugins.core.calls import OpCall, row_extents
from llmctl.plugins.core.example_parts import make_step, no_cache, plain_step, random_tensor
from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.operators import SPECS
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.plugins.ops.linear.reference import linear
from llmctl.plugins.ops.paged_attention.reference import attention
from llmctl.plugins.ops.quantize.reference import quantize_per_token, quantize_static
from llmctl.plugins.ops.rms_norm.reference import rms_norm
from llmctl.plugins.ops.rope_kv_write.reference import rotate
from llmctl.plugins.ops.silu.reference import reference as silu
from llmctl.plugins.ops.swiglu.reference import swiglu

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [LlamaRMSNorm, Qwen3RMSNorm])
def test_rms_norm_equals_transformers_bit_for_bit(dtype, module, generator):
    norm = module(72, eps=1e-5).to(getattr(torch, dtype))
    with torch.no_grad():
        norm.weight.copy_(random_tensor((72,), dtype, generator))
        x = random_tensor((33, 72), dtype, generator)
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_equals_transformers_bit_for_bit(dtype, generator):
    config = LlamaConfig(hidden_size=320, num_attention_heads=4, num_key_value_heads=2, head_dim=80)
    positions = torch.tensor([[0, 1, 5, 100, 1000]])
    q = random_tensor((1, 4, 5, 80), dtype, generator)
    k = random_tensor((1, 2, 5, 80), dtype, generator)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    wanted = apply_rotary_pos_emb(q, k, cos, sin)
    wide_cos, wide_sin = LlamaRotaryEmbedding(config)(q.float(), positions)
    factors = torch.cat((wide_cos[0, :, :40], wide_sin[0, :, :40]), dim=-1)
    for x, rotated in zip((q, k), wanted, strict=True):
        assert torch.equal(rotate(x[0].transpose(0, 1), factors).transpose(0, 1), rotated[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_equals_the_transformers_activation(dtype, generator):
    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=72)).to(getattr(torch, dtype))
    x = random_tensor((33, 144), dtype, generator, spread=3)
    gate, up = x.chunk(2, dim=-1)
    wanted = mlp.act_fn(gate) * up
    # torch's vectorised exp differs from its scalar one by a unit in the last place
    torch.testing.assert_close(swiglu(x), wanted, **_close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_a_residual_equal_what_torch_computes(dtype, generator):
    x, residual = (random_tensor((33, 72), dtype, generator, spread=3) for _ in range(2))
    rest = ({}, plain_step(33), no_cache())
    out, summed = torch.empty_like(x), torch.empty_like(x)
    silu({"x": x}, {"out": out}, *rest)
    wanted = torch.nn.functional.silu(x)
    torch.testing.assert_close(out, wanted, **_close(dtype))
    silu({"x": x, "residual": residual}, {"out": summed}, *rest)
    assert torch.equal(summed, residual + out)


def _close(dtype: str) -> dict[str, float]:
    ulp = {"float32": 2**-22, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    return {"rtol": ulp, "atol": 1e-7}


@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (5, 0), (7, 3)])
def test_attention_equals_torch_scaled_dot_product_attention(window, sinks, generator):
    q = random_tensor((3, 7, 16), "float32", generator)
    k = random_tensor((3, 40, 16), "float32", generator)
    v = random_tensor((3, 40, 16), "float32", generator)
    positions = torch.arange(33, 40)
    keys = torch.arange(40)
    mask = keys <= positions[:, None]
    if window:
        mask &= (positions[:, None] - keys < window - sinks) | (keys < sinks)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attention(q, k, v, positions, 0.3, window, sinks), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_torch_linear(dtype, generator):
    x = random_tensor((5, 72), dtype, generator)
    weight = random_tensor((37, 72), dtype, generator, spread=0.1)
    bias = random_tensor((37,), dtype, generator)
    wanted = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x, weight, wanted.dtype, bias=bias), wanted)


def test_linear_scales_dequantize(generator):
    wide = random_tensor((5, 72), "float32", generator)
    x, x_scale = quantize_per_token(wide)
    weight, weight_scale = quantize_per_token(random_tensor((37, 72), "float32", generator))
    wanted = (x.double() * x_scale[:, None]) @ (weight.double() * weight_scale[:, None]).T
    found = linear(x, weight, torch.float32, weight_scale, x_scale)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_quantization_saturates_and_keeps_nan():
    x = torch.tensor([1e9, -1e9, float("inf"), float("nan"), 449.0, 0.0])
    found = quantize_static(x, torch.tensor([1.0])).float()
    assert found[:3].tolist() == [448.0, -448.0, 448.0]
    assert found[3].isnan()
    assert found[4:].tolist() == [448.0, 0.0]


def test_per_token_quantization_uses_the_whole_range_and_survives_zero_rows():
    quantized, scale = quantize_per_token(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    assert quantized.float().tolist() == [[224.0, -448.0], [0.0, 0.0]]
    assert scale.tolist() == pytest.approx([2 / 448, 1.0])


def test_keys_and_values_land_in_their_slots_and_nowhere_else():
    case = {
        "requests": "3+30 1+64",
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": "float32",
        "kv_dtype": "float32",
        "qk_norm": False,
    }
    example = make_example("rope_kv_write", case)
    example.kv_cache.zero_()
    ReferenceProgram([example.call]).run(example.step, example.kv_cache)
    values = example.kv_cache[1, :, 1, 0].reshape(-1, 16)
    written = np.flatnonzero(values.abs().sum(1).numpy())
    assert sorted(written) == sorted(example.step.slot_mapping)
    v = example.call.inputs["qkv"].view(4, 4, 16)[:, 3]
    assert torch.equal(values[torch.from_numpy(example.step.slot_mapping).long()], v)
    assert not example.kv_cache[0].any()


def test_extent_follows_the_data_through_reused_buffers():
    arena = torch.zeros((3, 8, 4))
    weight = torch.zeros((4, 4))

    def linear_call(source: int, target: int) -> OpCall:
        inputs = {"x": arena[source], "weight": weight}
        return OpCall("linear", "linear", inputs, {"out": arena[target]}, {})

    calls = [
        OpCall("embedding", "e", {"weight": weight}, {"out": arena[0]}, {}),
        linear_call(0, 1),
        OpCall("gather_rows", "g", {"x": arena[1]}, {"out": arena[0]}, {}),
        linear_call(0, 1),
        linear_call(1, 2),
    ]
    assert row_extents(calls) == ["tokens", "tokens", "rows", "rows", "rows"]


def test_reference_program_computes_only_the_rows_that_get_logits():
    step, _ = make_step([(3, 0), (2, 0)])
    weight = torch.eye(4)
    tokens, rows, out = torch.arange(20.0).view(5, 4), torch.zeros(5, 4), torch.zeros(5, 4)
    calls = [
        OpCall("gather_rows", "g", {"x": tokens}, {"out": rows}, {}),
        OpCall("linear", "l", {"x": rows, "weight": weight}, {"out": out}, {}),
    ]
    ReferenceProgram(calls).run(step, torch.zeros((1, 1, 2, 1, 32, 4)))
    assert torch.equal(out[:2], tokens[[2, 4]])
    assert not out[2:].any()


@pytest.mark.parametrize("op", sorted(SPECS))
def test_every_case_of_a_spec_obeys_that_spec(op):
    for case in (*SPECS[op].cases, *SPECS[op].timed[:1]):
        SPECS[op].check(make_example(op, case).call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, o, a: i.pop("weight"), "has no input 'weight'"),
        (lambda i, o, a: i.update(weight=i["weight"].half()), "weight is float16, wanted bfloat16"),
        (lambda i, o, a: i.update(weight=i["weight"][:-1]), "but H is 16"),
        (lambda i, o, a: i.update(extra=i["weight"]), "unknown input 'extra'"),
        (lambda i, o, a: o.update(extra=i["weight"]), "unknown output 'extra'"),
        (lambda i, o, a: a.pop("epsilon"), "wanted ['epsilon']"),
        (lambda i, o, a: a.update(epsilon="x"), "wanted float"),
    ],
)
def test_a_call_that_breaks_its_spec_is_refused_by_name(change, message):
    call = make_example("rms_norm", {**SPECS["rms_norm"].cases[6], "dtype": "bfloat16"}).call
    inputs, outputs, attributes = dict(call.inputs), dict(call.outputs), dict(call.attributes)
    change(inputs, outputs, attributes)
    with pytest.raises(CorruptEngine, match="norm") as failure:
        SPECS["rms_norm"].check(OpCall("rms_norm", "norm", inputs, outputs, attributes))
    assert message in str(failure.value)


def test_an_unknown_operator_is_refused():
    with pytest.raises(CorruptEngine, match="'conv'"):
        ReferenceProgram([OpCall("conv", "c", {}, {}, {})])


def test_derived_shapes_are_checked():
    call = make_example("swiglu", SPECS["swiglu"].cases[0]).call
    wrong = OpCall("swiglu", "s", {"x": call.inputs["x"][:, :-2].contiguous()}, call.outputs, {})
    with pytest.raises(CorruptEngine, match="2I is 32"):
        SPECS["swiglu"].check(wrong)


def test_rows_are_gathered_into_rows_of_their_own_type():
    call = make_example("gather_rows", {**SPECS["gather_rows"].cases[0], "dtype": "bfloat16"}).call
    fp8 = {"x": call.inputs["x"].to(torch.float8_e4m3fn)}
    with pytest.raises(CorruptEngine, match="x, out are .*float8_e4m3fn.*bfloat16.* one dtype"):
        SPECS["gather_rows"].check(OpCall("gather_rows", "g", fp8, call.outputs, {}))
