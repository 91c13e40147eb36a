"""The row-wise Triton kernels: in the interpreter against the references, and as compiled code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernel import KERNEL_DTYPES, interpret, launch_env, step_shape
from support.small_kernels import CASES, OPS, label, require_no_spills, specs_of, with_most_to_do

from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import make_step
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.core.op_spec import FP8, Case
from llmctl.plugins.core.operators import SPECS, operator_module
from llmctl.plugins.ops.gather_rows.kernel import gather

# Nothing here but a sum and an exponential can differ from the references.
EXACT_OPS = {"embedding", "gather_rows", "quantize", "concat", "expand_logits", "add", "all_gather"}
SMALL = [(op, case) for op, case in CASES if case not in SPECS[op].timed]


def run_reference(example: Example) -> None:
    call = example.call
    function = operator_module(call.op, "reference").reference
    function(call.inputs, call.outputs, call.attributes, example.step, example.kv_cache)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, op: str, what: str) -> None:
    if op in EXACT_OPS:
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), what
        return
    tolerance = SPECS[op].tolerance[str(wanted.dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=tolerance.rtol, atol=tolerance.atol, msg=what
    )
    assert (found.float() != wanted.float()).float().mean() < 0.01, what  # flips are rare


@pytest.mark.parametrize(("op", "case"), SMALL, ids=label)
def test_kernels_compute_what_the_references_do(op: str, case: Case):
    found, wanted = make_example(op, case), make_example(op, case)
    interpret(found)
    run_reference(wanted)
    for role, tensor in wanted.call.outputs.items():
        assert_close(found.call.outputs[role], tensor, op, role)
    assert_close(found.kv_cache, wanted.kv_cache, op, "KV cache")


@pytest.mark.parametrize("op", OPS)
def test_kernels_compile_without_spills(op: str):
    require_no_spills(with_most_to_do(specs_of(op)))


@pytest.mark.parametrize("scaling", ["static", "per_token"])
def test_quantization_keeps_nan_saturates_and_rounds_ties_to_even(scaling: str):
    case = {"tokens": 3, "hidden": 31, "dtype": "bfloat16", "scaling": scaling}
    found = make_example("quantize", case)
    x = found.call.inputs["x"]
    x[0] = 0
    x[1, :6] = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 448, -449])
    x[1, 6:] = 0
    x[2, 3] = torch.nan
    if scaling == "static":  # ties and subnormals at scale 1
        found.call.inputs["scale"].fill_(1.0)
        x[0, :8] = torch.tensor([17, 19, 21, -17, 2**-10, 3 * 2**-10, -(2**-10), 2**-9])
    wanted = found.clone()
    interpret(found)
    run_reference(wanted)
    left, right = found.call.outputs["out"].float(), wanted.call.outputs["out"].float()
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    assert right[2, 3].isnan()
    assert right[1, 0] == 448 or scaling == "per_token"
    if scaling == "per_token":
        scales = [e.call.outputs["out_scale"] for e in (found, wanted)]
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 3.0 / 448, 0.0123, 1e-5, 777.0, 2.0**-90, 2.0**90, 1e-40])
def test_quotients_are_those_of_a_true_division(scale: float):
    """Values that fill FP8's range, the midpoints between its numbers, and their neighbours."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    wide = torch.cat((codes, middles, torch.randn(20000, generator=generator) * 300)) * scale
    x = wide.to(torch.float16 if scale == 1.0 else torch.bfloat16)
    x = torch.cat((x, torch.nextafter(x.float(), torch.tensor(torch.inf)).to(x.dtype)))[None]
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    call = OpCall("quantize", "q", {"x": x, "scale": torch.tensor([scale])}, {"out": out}, {})
    example = Example(call, make_step([(1, 0)])[0], torch.zeros((1, 1, 2, 1, 32, 16)))
    interpret(example)
    found = out.clone()
    run_reference(example)
    assert torch.equal(found.view(torch.uint8), out.view(torch.uint8))


def test_in_place_residuals_hold_the_sum():
    case = {
        "tokens": 5,
        "hidden": 72,
        "dtype": "bfloat16",
        "scaling": "static",
        "residual": True,
    }
    found = make_example("rms_norm", case)
    x, residual = found.call.inputs["x"], found.call.inputs["residual"]
    assert found.call.outputs["residual_out"] is residual
    wanted = (x.float() + residual.float()).to(x.dtype)
    interpret(found)
    assert torch.equal(residual, wanted)


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it():
    case = {
        "tokens": 33,
        "hidden": 257,
        "dtype": "bfloat16",
        "scaling": "per_token",
        "residual": True,
    }
    whole = make_example("rms_norm", case)
    part = whole.clone()
    interpret(whole)
    env, shape = launch_env(part), replace(step_shape(part.step), num_tokens=2)
    before = part.call.outputs["out"][2:].clone().view(torch.uint8)
    run_launches(operator_module("rms_norm", "kernel").launches(part.call, env, shape))
    for role in ("out", "out_scale", "residual_out"):
        found, wanted = part.call.outputs[role][:2], whole.call.outputs[role][:2]
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(part.call.outputs["out"][2:].view(torch.uint8), before)


@pytest.mark.parametrize(("op", "role"), [("embedding", "out"), ("embedding_norm", "embedded")])
def test_tokens_outside_the_vocabulary_read_inside_the_table(op: str, role: str):
    case = {"tokens": 5, "vocab": 131, "hidden": 72, "dtype": "bfloat16", "scaling": "none"}
    example = make_example(op, case)
    example.step.token_ids[:2] = (-1, 131)
    interpret(example)
    table, out = example.call.inputs["weight"], example.call.outputs[role]
    assert torch.equal(out[0], table[0])
    assert torch.equal(out[1], table[130])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", FP8, "int8"])
def test_padding_tokens_write_no_slot(kv_dtype: str):
    case = {
        "requests": "5+0",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 80,
        "dtype": "bfloat16",
        "kv_dtype": kv_dtype,
        "qk_norm": True,
    }
    example = make_example("rope_kv_write", case)
    before = example.kv_cache.clone()
    kept = example.step.slot_mapping.copy()
    example.step.slot_mapping[:] = -1
    interpret(example)
    assert torch.equal(example.kv_cache.view(torch.uint8), before.view(torch.uint8))
    example.step.slot_mapping[:] = kept
    interpret(example)
    assert not torch.equal(example.kv_cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.021, 3.0 / 127, 1e-3, 777.0])
def test_int8_keys_and_values_are_the_references_to_the_last_bit(dtype: str, scale: float):
    """Ties and their neighbours, what saturates, infinities and NaN."""
    case = {"requests": "9+0", "num_heads": 1, "num_kv_heads": 1, "head_size": 128,
            "dtype": dtype, "kv_dtype": "int8", "qk_norm": False}  # fmt: skip
    found = make_example("rope_kv_write", case)
    for role in ("k_scale", "v_scale"):
        found.call.inputs[role].fill_(scale)
    values = found.call.inputs["qkv"].view(9, 3, 128)[:, 1:]
    values.mul_(40 * scale)
    ties = torch.arange(-128, 128) + 0.5
    for row, factor in enumerate((1.0, 1 - 2**-8, 1 + 2**-8)):
        values[row] = (ties * scale * factor).view(2, 128)
    values[3, :, :6] = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan, -0.0])
    found.call.inputs["rotary"][3] = torch.tensor([1.0, 0.0]).repeat_interleave(64)
    wanted = found.clone()
    interpret(found)
    run_reference(wanted)
    assert torch.equal(found.kv_cache, wanted.kv_cache)
    stored = found.kv_cache[1][:, :, 0].flatten()
    assert stored.min() == -127 and stored.max() == 127


@pytest.mark.parametrize("scaling", ["none", "static", "per_token"])
def test_an_embedding_with_its_norm_has_the_bits_of_the_two(scaling: str):
    case = {"tokens": 33, "vocab": 131, "hidden": 257, "dtype": "bfloat16", "scaling": scaling}
    one = make_example("embedding_norm", case)
    interpret(one)
    given, made = one.call.inputs, one.call.outputs
    embedded = torch.zeros_like(made["embedded"])
    call = OpCall("embedding", "e", {"weight": given["weight"]}, {"out": embedded}, {})
    interpret(replace(one, call=call))
    inputs = {role: given[role] for role in ("scale",) if role in given}
    outputs = {role: torch.zeros_like(made[role]) for role in made if role != "embedded"}
    inputs |= {"x": embedded, "weight": given["norm_weight"]}
    interpret(replace(one, call=OpCall("rms_norm", "n", inputs, outputs, {"epsilon": 1e-5})))
    for role, tensor in {"embedded": embedded, **outputs}.items():
        assert torch.equal(made[role].view(torch.uint8), tensor.view(torch.uint8)), role


@pytest.mark.parametrize("width", [8, 264, 1032])
def test_rows_of_several_tensors_are_gathered_side_by_side(width: int):
    """As a head reads what layers of the target leave. Rows outside take the nearest."""
    parts = [torch.randn(11, width).bfloat16() for _ in range(3)]
    rows = torch.tensor([4, 0, 10, 4, -1, 99], dtype=torch.int32)
    out = torch.zeros(9, 3 * width, dtype=torch.bfloat16)
    for nth, part in enumerate(parts):
        run_launches(gather(part, rows, out[:, nth * width : (nth + 1) * width], 6, beside=3))
    wanted = torch.cat([part[rows.clamp(0, 10)] for part in parts], dim=1)
    assert torch.equal(out[:6], wanted) and not out[6:].any()


def test_steps_without_rows_launch_nothing():
    for op in OPS:
        case = next(case for name, case in CASES if name == op)
        example = make_example(op, case)
        shape = replace(step_shape(example.step), num_tokens=0, num_rows=0)
        kernel = operator_module(op, "kernel")
        assert kernel.launches(example.call, launch_env(example), shape) == []
