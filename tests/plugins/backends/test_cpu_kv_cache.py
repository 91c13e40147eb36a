"""Keys and values as INT8, and windows with sinks, in the cpu kernels: against the references, and
against torch's own attention over what the cache stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.plugins.backends import cpu
from llmctl.plugins.backends.cpu.program import CpuProgram
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.core.example_parts import make_step, parse_requests
from llmctl.plugins.core.examples import Example, make_example
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.plugins.ops.paged_attention.reference import gather_keys
from llmctl.plugins.ops.paged_attention.spec import SPEC

TILE = 64  # the largest number of keys that any kernel reads at a time


@pytest.fixture(autouse=True)
def restore_variant():
    yield
    cpu.set_instruction_set(cpu.instruction_sets()[0])


def attention_example(requests="40+33 3+164 1+90", **changes):
    case = {
        "requests": requests,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 80,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "window": 0,
        "quantize_out": False,
        "tokens_per_block": 32,
        **changes,
    }
    example = make_example("paged_attention", case)
    example.call.attributes.update(
        {key: changes[key] for key in ("sink_tokens",) if key in changes}
    )
    return example


def as_int8(example: Example) -> Example:
    """The same operator over a cache of INT8, K and V with a scale each."""
    cache = (example.kv_cache.float() * 40).round().clamp(-127, 127).to(torch.int8)
    scales = {"k_scale": torch.tensor([0.021]), "v_scale": torch.tensor([0.034])}
    call = example.call
    inputs = {**call.inputs, **scales}
    changed = OpCall(call.op, call.name, inputs, call.outputs, call.attributes)
    return Example(changed, example.step, cache)


def run(example: Example, program=CpuProgram) -> Example:
    copy = example.clone()
    program([copy.call]).run(copy.step, copy.kv_cache)
    return copy


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = SPEC.tolerance[str(found.dtype).removeprefix("torch.")]
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=tolerance.rtol, atol=tolerance.atol
    )


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_over_int8_equals_the_reference(isa, dtype):
    cpu.set_instruction_set(isa)
    example = as_int8(attention_example(dtype=dtype, kv_dtype=dtype))
    wanted = run(example, ReferenceProgram).call.outputs["out"]
    assert_near(run(example).call.outputs["out"], wanted)


def test_attention_over_int8_is_torch_attention_over_what_it_stands_for():
    example = as_int8(attention_example("1+90", dtype="float32", kv_dtype="float32"))
    found = run(example).call.outputs["out"]
    call, step = example.call, example.step
    cache = example.kv_cache[call.attributes["layer"]]
    blocks = torch.from_numpy(step.block_tables[0]).long()
    k = gather_keys(cache[:, 0], blocks, 91) * call.inputs["k_scale"]
    v = gather_keys(cache[:, 1], blocks, 91) * call.inputs["v_scale"]
    q = call.inputs["q"].view(8, 1, 80)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None].repeat_interleave(4, 1), v[None].repeat_interleave(4, 1)
    )
    torch.testing.assert_close(found.view(8, 80), wanted[0, :, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_keys_and_values_are_written_as_int8_to_the_last_bit(isa):
    cpu.set_instruction_set(isa)
    case = {
        "requests": "1+70 4+9", "num_heads": 4, "num_kv_heads": 2, "head_size": 80,
        "dtype": "bfloat16", "kv_dtype": "float32", "qk_norm": False,
    }  # fmt: skip
    example = as_int8(make_example("rope_kv_write", case))
    example.call.inputs["qkv"][0, -40:] = 1e6  # saturates
    example.call.inputs["qkv"][1, -40:] = float("nan")
    found, wanted = run(example), run(example, ReferenceProgram)
    assert torch.equal(found.kv_cache, wanted.kv_cache)
    assert (found.kv_cache != example.kv_cache).any()


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize(
    ("window", "sinks"), [(24, 4), (24, 0), (40, 33), (64, 32), (100, 64), (9, 8), (300, 5)]
)
@pytest.mark.parametrize("is_int8", [False, True])
def test_windows_with_sinks_equal_the_reference(isa, window, sinks, is_int8):
    cpu.set_instruction_set(isa)
    example = attention_example("70+33 3+164 1+290 5+0", window=window, sink_tokens=sinks)
    example = as_int8(example) if is_int8 else example
    wanted = run(example, ReferenceProgram).call.outputs["out"]
    assert_near(run(example).call.outputs["out"], wanted)


@pytest.mark.parametrize(("window", "sinks"), [(40, 3), (90, 40), (64, 32)])
def test_with_sinks_a_token_has_the_same_bits_alone_and_in_chunks(window, sinks):
    requests = "150+7 6+190"
    whole = attention_example(requests, window=window, sink_tokens=sinks)
    wanted = run(whole).call.outputs["out"]
    tables, cu_q = whole.step.block_tables, whole.step.cu_q
    for request, (new, old) in enumerate(parse_requests(requests)):
        for size in (1, 5, 64):
            for start in range(0, new, size):
                count = min(size, new - start)
                step = make_step([(count, old + start)])[0]
                step.block_tables = tables[request : request + 1].copy()
                rows = slice(int(cu_q[request]) + start, int(cu_q[request]) + start + count)
                inputs = {**whole.call.inputs, "q": whole.call.inputs["q"][rows]}
                out = torch.zeros_like(wanted[rows])
                call = OpCall("paged_attention", "p", inputs, {"out": out}, whole.call.attributes)
                CpuProgram([call]).run(step, whole.kv_cache)
                assert torch.equal(out, wanted[rows]), (request, start, count)


@pytest.mark.parametrize(("window", "sinks"), [(40, 0), (40, 3), (130, 70)])
def test_nothing_is_read_between_the_sinks_and_the_window_beyond_a_tile(window, sinks):
    example = attention_example("3+400", dtype="float32", kv_dtype="float32", window=window,
                                sink_tokens=sinks)  # fmt: skip
    wanted = run(example).call.outputs["out"]
    step, cache = example.step, example.kv_cache
    oldest = int(step.position_ids[0]) + 1 - (window - sinks)
    positions = np.arange(-(-sinks // TILE) * TILE, oldest // TILE * TILE)
    assert len(positions) > 100
    for position in positions:
        cache[:, step.block_tables[0][position // 32], :, :, position % 32] = float("nan")
    assert torch.equal(run(example).call.outputs["out"], wanted)
