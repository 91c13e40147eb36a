"""Packed weights: layout, row orders, and the fused references against the unfused ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.plugins.core.examples import make_example
from llmctl.plugins.core.operators import SPECS
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.plugins.ops.packed_linear.arguments import form_of
from llmctl.plugins.ops.packed_linear.layout import (
    numbers_of,
    pack,
    packed_shape,
    pair_order,
    plain_order,
    reorder,
    restore,
    rope_order,
    unpack,
)

PACKED = ("packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv")
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and np.array_equal(
        left.contiguous().view(torch.uint8).numpy(), right.contiguous().view(torch.uint8).numpy()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(64, 128), (1, 16), (131, 1040), (200, 257)])
def test_unpacking_gives_back_what_was_packed(dtype, rows, inner):
    weight = torch.randn(rows, inner).to(dtype)
    packed = pack(weight)
    assert packed.shape == packed_shape(rows, inner, dtype.itemsize)
    assert packed.is_contiguous()
    assert same_bytes(unpack(packed, rows, inner), weight)


def test_a_block_has_the_swizzle_that_wgmma_reads():
    """The address of the tensor core's 128-byte swizzle: bits 4-6 are exclusive-ored with 7-9."""
    weight = torch.arange(64 * 128, dtype=torch.int32).view(64, 128)
    raw = (weight % 251).to(torch.uint8).view(torch.float8_e4m3fn)
    stored = pack(raw).view(torch.uint8).flatten()
    linear = torch.arange(64 * 128)
    swizzled = linear ^ (((linear >> 7) & 7) << 4)
    assert torch.equal(stored[swizzled], raw.view(torch.uint8).flatten())


def test_padding_is_zero():
    packed = pack(torch.ones(65, 130, dtype=torch.bfloat16))
    assert packed.shape == (2, 3, 64, 64)
    assert packed.float().sum() == 65 * 130


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        (plain_order(70), 70),
        (pair_order(72), 144),
        (rope_order(4, 2, 80), 640),
        (rope_order(3, 1, 16), 80),
    ],
)
def test_every_logical_row_has_one_place(order, rows):
    assert len(order) % 64 == 0
    assert torch.equal(order[order >= 0].sort().values, torch.arange(rows))
    weight = torch.randn(rows, 3)
    assert torch.equal(restore(reorder(weight, order), order), weight)
    assert not reorder(weight, order)[order < 0].any()


def test_gate_and_up_meet_eight_rows_apart():
    order = pair_order(24).view(-1, 2, 8)[:3]
    assert torch.equal(order[:, 1] - order[:, 0], torch.full((3, 8), 24))


def test_rotary_partners_meet_eight_rows_apart_and_values_keep_their_order():
    order = rope_order(2, 1, 32)
    rotated = order[: 3 * 32].view(-1, 2, 8)
    assert torch.equal(rotated[:, 1] - rotated[:, 0], torch.full((6, 8), 16))
    assert torch.equal(order[96:128], torch.arange(96, 128))


@pytest.mark.parametrize("op", PACKED)
def test_examples_obey_their_spec_and_references_write_every_output(op):
    for case in SPECS[op].cases:
        example = make_example(op, case)
        before = {role: out.clone() for role, out in example.call.outputs.items()}
        ReferenceProgram([example.call]).run(example.step, example.kv_cache)
        for role, out in example.call.outputs.items():
            assert not same_bytes(before[role], out)
            assert torch.isfinite(out.float()).all()


def unfused(example, order):
    """The same weights as a plain call of `linear`: x, weight, scales, bias in logical order."""
    inputs = example.call.inputs
    inner = inputs["x"].shape[1]
    plain = {role: inputs[role] for role in ("x", "x_scale") if role in inputs}
    numbers = numbers_of(inputs["weight"], len(order), inner, form_of(example.call))
    plain["weight"] = restore(numbers, order)
    for role in ("weight_scale", "bias"):
        if role in inputs:
            plain[role] = restore(inputs[role], order)
    return plain


def linear_call(inputs, out):
    from llmctl.plugins.core.calls import OpCall

    return OpCall("linear", "linear", inputs, {"out": out}, {})


@pytest.mark.parametrize("case", SPECS["packed_linear_swiglu"].cases)
def test_the_fused_swiglu_equals_linear_then_swiglu(case):
    from llmctl.plugins.core.calls import OpCall

    example = make_example("packed_linear_swiglu", case)
    call = example.call
    out = call.outputs["out"]
    ReferenceProgram([call]).run(example.step, example.kv_cache)
    dtype = getattr(torch, str(case["model_dtype"]))
    both = torch.empty(len(out), 2 * out.shape[1], dtype=dtype)
    apart = torch.empty_like(out)
    scales = {"scale": call.inputs["scale"]} if "scale" in call.inputs else {}
    ReferenceProgram(
        [
            linear_call(unfused(example, pair_order(out.shape[1])), both),
            OpCall("swiglu", "swiglu", {"x": both, **scales}, {"out": apart}, {}),
        ]
    ).run(example.step, example.kv_cache)
    assert same_bytes(out, apart)


@pytest.mark.parametrize("case", SPECS["packed_linear_rope_kv"].cases)
def test_the_fused_rope_equals_linear_then_rope_kv_write(case):
    from llmctl.plugins.core.calls import OpCall

    example = make_example("packed_linear_rope_kv", case)
    call, cache = example.call, example.kv_cache.clone()
    ReferenceProgram([call]).run(example.step, example.kv_cache)
    attributes = {k: v for k, v in call.attributes.items() if k != "scheme"}
    order = rope_order(*(attributes[k] for k in ("num_heads", "num_kv_heads", "head_size")))
    q = call.outputs["q"]
    qkv = torch.empty(len(q), int((order >= 0).sum()), dtype=q.dtype)
    apart = torch.empty_like(q)
    rest = {k: call.inputs[k] for k in ("rotary", "k_scale", "v_scale") if k in call.inputs}
    ReferenceProgram(
        [
            linear_call(unfused(example, order), qkv),
            OpCall(
                "rope_kv_write",
                "rope",
                {"qkv": qkv, **rest},
                {"q": apart},
                {**attributes, "epsilon": 0.0},
            ),
        ]
    ).run(example.step, cache)
    assert same_bytes(q, apart)
    assert same_bytes(example.kv_cache, cache)
