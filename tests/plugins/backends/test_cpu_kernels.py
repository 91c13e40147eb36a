"""The CPU kernels against the references over every case of every spec, and their exactness:
bits do not depend on the number of tokens, threads, chunks, or the AVX variant."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from llmctl.plugins.backends import cpu
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import make_step, parse_requests
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.core.op_spec import FP8
from llmctl.plugins.core.operators import CPU_KINDS, SPECS
from llmctl.plugins.core.reference import ReferenceProgram

FUSED = [name for name in cpu.instruction_sets() if name != "generic"]


def run(example: Example, program=cpu.CpuProgram) -> Example:
    fresh = example.clone()
    program([fresh.call]).run(fresh.step, fresh.kv_cache)
    return fresh


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(found: Example, wanted: Example) -> None:
    for role, tensor in wanted.call.outputs.items():
        assert torch.equal(bits(found.call.outputs[role]), bits(tensor)), role
    assert torch.equal(bits(found.kv_cache), bits(wanted.kv_cache))


def assert_close(op: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = SPECS[op].tolerance[str(wanted.dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=tolerance.rtol, atol=tolerance.atol
    )


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("op", sorted(CPU_KINDS))
def test_a_kernel_agrees_with_its_reference_on_every_case(op, isa):
    cpu.set_instruction_set(isa)
    for case in SPECS[op].cases:
        example = make_example(op, case)
        wanted, found = run(example, ReferenceProgram), run(example)
        for role, tensor in wanted.call.outputs.items():
            assert_close(op, found.call.outputs[role], tensor)
        assert_close(op, found.kv_cache, wanted.kv_cache)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "rope_kv_write"])
def test_rounded_results_almost_always_equal_the_reference_exactly(op):
    """Only a different order of a float32 sum may move a value across a rounding boundary."""
    different, total = 0, 0
    for case in SPECS[op].cases:
        if case["dtype"] != "float32":
            example = make_example(op, case)
            wanted, found = run(example, ReferenceProgram), run(example)
            for role, tensor in wanted.call.outputs.items():
                different += int((found.call.outputs[role].float() != tensor.float()).sum())
                total += tensor.numel()
    assert different <= total * 2e-3


def test_rotation_without_norms_equals_the_reference_exactly():
    for case in SPECS["rope_kv_write"].cases:
        if not case["qk_norm"]:
            example = make_example("rope_kv_write", case)
            assert_same_bits(run(example), run(example, ReferenceProgram))


@pytest.mark.parametrize("op", sorted(CPU_KINDS))
def test_threads_and_vector_width_do_not_change_a_bit(op):
    for case in SPECS[op].cases[:: 1 if op == "paged_attention" else 2]:
        example = make_example(op, case)
        cpu.set_num_threads(1)
        wanted = run(example)
        for isa, threads in itertools.product(FUSED, (1, 2, 3)):
            cpu.set_instruction_set(isa)
            cpu.set_num_threads(threads)
            assert_same_bits(run(example), wanted)


@pytest.mark.parametrize("isa", FUSED)
@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), (FP8, FP8)],
)
def test_a_product_row_has_the_same_bits_alone_and_in_any_batch(isa, x_dtype, dtype):
    cpu.set_instruction_set(isa)
    for outputs, inner in ((131, 2100), (70, 264), (33, 17)):
        case = {
            "tokens": 1100,  # three chunks, groups that end within tiles
            "outputs": outputs,
            "inner": inner,
            "x_dtype": x_dtype,
            "dtype": dtype,
            "x_scaling": "per_token",
            "bias": True,
        }
        whole = make_example("linear", case)
        wanted = run(whole).call.outputs["out"]
        for count in (*range(1, 20), 33, 126, 127, 200, 504, 505):
            start = (count * 37) % (1100 - count)
            rows = slice(start, start + count)
            inputs = dict(whole.call.inputs)
            inputs["x"] = inputs["x"][rows]
            if "x_scale" in inputs:
                inputs["x_scale"] = inputs["x_scale"][rows]
            out = torch.zeros_like(wanted[rows])
            call = OpCall("linear", "part", inputs, {"out": out}, {})
            step = make_step([(count, 0)])[0]
            cpu.CpuProgram([call]).run(step, whole.kv_cache)
            assert torch.equal(bits(out), bits(wanted[rows])), (outputs, inner, count)


@pytest.mark.parametrize("isa", FUSED)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", FP8])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (8, 2), (3, 3), (40, 1)])
def test_attention_has_the_same_bits_token_by_token_and_in_chunks(
    isa, kv_dtype, window, heads, kv_heads
):
    cpu.set_instruction_set(isa)
    case = {
        "requests": "150+7 1+40 6+90",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": 80,
        "dtype": "bfloat16",
        "kv_dtype": kv_dtype,
        "window": window,
        "quantize_out": False,
        "tokens_per_block": 32,
    }
    whole = make_example("paged_attention", case)
    wanted = run(whole).call.outputs["out"]
    tables, cu_q = whole.step.block_tables, whole.step.cu_q
    for request, (new, old) in enumerate(parse_requests(case["requests"])):
        for size in (1, 5, 64):
            for start in range(0, new, size):
                count = min(size, new - start)
                step = make_step([(count, old + start)])[0]
                step.block_tables = tables[request : request + 1].copy()
                blocks = step.block_tables[0][step.position_ids // 32]
                step.slot_mapping = (blocks * 32 + step.position_ids % 32).astype(np.int32)
                rows = slice(int(cu_q[request]) + start, int(cu_q[request]) + start + count)
                inputs = {**whole.call.inputs, "q": whole.call.inputs["q"][rows]}
                out = torch.zeros_like(wanted[rows])
                call = OpCall("paged_attention", "p", inputs, {"out": out}, whole.call.attributes)
                cpu.CpuProgram([call]).run(step, whole.kv_cache)
                assert torch.equal(bits(out), bits(wanted[rows])), (request, start, count)


def test_attention_reads_nothing_beyond_the_keys_of_a_request():
    case = {**SPECS["paged_attention"].cases[2], "window": 0, "quantize_out": False}
    example = make_example("paged_attention", {**case, "dtype": "float32", "kv_dtype": "float32"})
    wanted = run(example).call.outputs["out"]
    step, cache = example.step, example.kv_cache
    used = torch.zeros(cache.shape[1], cache.shape[4], dtype=torch.bool)
    for row, length in enumerate(step.kv_len):
        where = np.arange(length)
        used[step.block_tables[row][where // cache.shape[4]], where % cache.shape[4]] = True
    cache.masked_fill_(~used[None, :, None, None, :, None], float("nan"))
    assert torch.equal(run(example).call.outputs["out"], wanted)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantization_equals_torch_for_every_16_bit_value(isa, dtype):
    cpu.set_instruction_set(isa)
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype))
    x = values.view(64, 1024)
    for scale in (1.0, 0.37, 2.0**-7):
        out = torch.zeros((64, 1024), dtype=torch.float8_e4m3fn)
        inputs = {"x": x, "scale": torch.tensor([scale])}
        call = OpCall("quantize", "q", inputs, {"out": out}, {})
        cpu.CpuProgram([call]).run(make_step([(64, 0)])[0], torch.zeros(1, 1, 2, 1, 32, 16))
        wanted = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(out.float().nan_to_num(1e9), wanted.float().nan_to_num(1e9))
        finite = ~wanted.float().isnan()
        assert torch.equal(bits(out)[finite], bits(wanted)[finite])  # the sign of zero too


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_every_fp8_value_is_read_exactly(isa):
    """As weights (all but NaN) and as activations, through a product with the identity."""
    cpu.set_instruction_set(isa)
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    finite = values.float().nan_to_num(0.0)
    eye = torch.eye(256)
    weight = finite.to(torch.float8_e4m3fn).repeat(8, 1)
    scaled_x = {"x": values.repeat(256, 1), "x_scale": torch.ones(1)}
    for inputs, wanted in (
        ({"x": eye, "weight": weight, "weight_scale": torch.ones(8)}, finite),
        ({**scaled_x, "weight": eye[:8].contiguous()}, values.float()[:8]),
    ):
        out = torch.zeros((256, 8))
        call = OpCall("linear", "l", inputs, {"out": out}, {})
        cpu.CpuProgram([call]).run(make_step([(256, 0)])[0], torch.zeros(1, 1, 2, 1, 32, 16))
        if len(wanted) == 256:
            assert torch.equal(out[:, 0], wanted)
        else:  # every row holds NaN somewhere, and 0 * NaN is NaN
            assert out.isnan().all()
    x = finite.to(torch.float8_e4m3fn).repeat(256, 1)
    out = torch.zeros((256, 256))
    inputs = {"x": x, "x_scale": torch.ones(1), "weight": eye}
    call = OpCall("linear", "l", inputs, {"out": out}, {})
    cpu.CpuProgram([call]).run(make_step([(256, 0)])[0], torch.zeros(1, 1, 2, 1, 32, 16))
    assert torch.equal(out[0], finite)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_16_bits_equals_torch(isa, dtype):
    cpu.set_instruction_set(isa)
    kind = getattr(torch, dtype)
    # every finite value times factors that end on, above and below halfway between two results
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(kind)[:, None]
    x = x[x.isfinite()][:, None].contiguous()
    for factor in (1.0, 1.5, 1.37, 2.0**-6, 2.0**-12, 1 + 2.0**-8, 1 + 2.0**-11):
        scale = torch.tensor([factor])
        one = torch.ones(1, 1).to(torch.float8_e4m3fn)  # scales belong to FP8 weights alone
        inputs = {"x": x, "weight": one, "weight_scale": scale}
        out = torch.zeros((len(x), 1), dtype=kind)
        call = OpCall("linear", "l", inputs, {"out": out}, {})
        cpu.CpuProgram([call]).run(make_step([(len(x), 0)])[0], torch.zeros(1, 1, 2, 1, 32, 16))
        assert torch.equal(out, (x.float() * scale).to(kind)), factor


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_silu_is_within_a_few_units_of_the_exact_value(isa):
    """Measures exp through swiglu in float32, against float64."""
    cpu.set_instruction_set(isa)
    gate = torch.cat([torch.linspace(-87, 87, 65520), torch.tensor([-0.0, 0.0, 1e-30, -1e-30])])
    gate = torch.cat(
        [gate, torch.tensor([-200.0, 200.0, 88.0, -88.0, 50, -50, 1, -1, 3, -3, 9, 2])]
    )
    width = len(gate)
    x = torch.cat([gate, torch.ones(width)])[None].contiguous()
    out = torch.zeros((1, width))
    call = OpCall("swiglu", "s", {"x": x}, {"out": out}, {})
    cpu.CpuProgram([call]).run(make_step([(1, 0)])[0], torch.zeros(1, 1, 2, 1, 32, 16))
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    torch.testing.assert_close(out[0].double(), exact, rtol=4 * 2**-24, atol=1e-37)
    assert not out.isnan().any()


def test_nan_and_infinity_pass_through_swiglu_and_norm():
    x = torch.tensor([[float("nan"), 1.0, float("inf"), 1.0]])
    out = torch.zeros((1, 2))
    call = OpCall("swiglu", "s", {"x": x}, {"out": out}, {})
    cpu.CpuProgram([call]).run(make_step([(1, 0)])[0], torch.zeros(1, 1, 2, 1, 32, 16))
    assert math.isnan(out[0, 0])
    assert out[0, 1] == pytest.approx(1 / (1 + math.exp(-1)))


def test_argmax_takes_the_lowest_index_on_ties_and_reports_nan():
    rows = np.zeros((6, 1003), np.float32)
    rows[0, [7, 500, 1002]] = 1
    rows[1, 1002] = 2
    rows[2, [3, 900]] = np.inf
    rows[3] = -np.inf
    rows[4, 1001] = np.nan
    rows[5, 3] = np.nan
    assert cpu.CpuSampling().argmax(rows).tolist() == [7, 1002, 3, 0, -1, -1]
    random = np.random.default_rng(0).standard_normal((5, 128256)).astype(np.float32)
    assert cpu.CpuSampling().argmax(random).tolist() == random.argmax(1).tolist()
