"""The packed products of many tokens, compiled: instructions, registers, tile shapes, grids."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.kernel import disassemble

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import CompiledKernel, compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    LaunchEnv,
    StepLimits,
    StepShape,
    TensorMap,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.kernel import kernels, launches
from llmctl.plugins.ops.packed_linear.layout import packed_shape
from llmctl.plugins.ops.packed_linear.prefill import (
    EVEN_120,
    EVEN_NARROW,
    EVEN_SQUARE,
    EVEN_THIN,
    LONG,
    NARROW,
    SLIM,
    SQUARE,
    THIN,
    WIDE,
    WIDE_96,
    WIDE_120,
    Variant,
    choose,
    prefill_launch,
    prefill_spec,
    variants_of,
)

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
MAX_TOKENS = 2048


def limits(kv_dtype: str = "float8_e4m3fn") -> StepLimits:
    return StepLimits(MAX_TOKENS, 8, 8, 4096, 10, 32, kv_dtype)


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def make_call(
    op: str, kind: torch.dtype, out: torch.dtype, rows: int = 4096, inner: int = 1024, **more: bool
) -> OpCall:
    shape = packed_shape(rows, inner, kind.itemsize)
    inputs = {"x": meta(MAX_TOKENS, inner, dtype=kind), "weight": meta(*shape, dtype=kind)}
    model = BF16 if kind == FP8 else kind
    if kind == FP8:
        inputs["weight_scale"] = meta(shape[0] * 64)
        inputs["x_scale"] = meta(MAX_TOKENS if more.get("per_token") else 1)
    if more.get("bias"):
        inputs["bias"] = meta(shape[0] * 64, dtype=model)
    attributes: dict[str, int | float | str | bool] = {}
    role, width = "out", rows
    if op == "packed_linear_swiglu":
        attributes, width = {"dtype": str(model).removeprefix("torch.")}, rows // 2
        if out == FP8:
            inputs["scale"] = meta(1)
    elif op == "packed_linear_rope_kv":
        role, width = "q", rows // 2
        inputs |= {"rotary": meta(4096, 128), "k_scale": meta(1), "v_scale": meta(1)}
        attributes = {"layer": 0, "num_heads": 16, "num_kv_heads": 8, "head_size": 128}
    return OpCall(op, op, inputs, {role: meta(MAX_TOKENS, width, dtype=out)}, attributes)


CALLS = {
    "fp8": make_call("packed_linear", FP8, BF16),
    "fp8 per token with bias": make_call("packed_linear", FP8, BF16, per_token=True, bias=True),
    "fp8 logits": make_call("packed_linear", FP8, FP32),
    "fp8 swiglu": make_call("packed_linear_swiglu", FP8, FP8),
    "fp8 swiglu to bf16": make_call("packed_linear_swiglu", FP8, BF16),
    "fp8 rope": make_call("packed_linear_rope_kv", FP8, BF16),
    "bf16": make_call("packed_linear", BF16, BF16),
    "bf16 swiglu": make_call("packed_linear_swiglu", BF16, BF16),
    "fp16 rope": make_call("packed_linear_rope_kv", FP16, FP16),
}
COMPILED = [(name, variant) for name, call in CALLS.items() for variant in variants_of(call)]


@cache
def compiled(name: str, variant: Variant) -> CompiledKernel:
    return compile_kernel(prefill_spec(CALLS[name], variant, limits()))


def instructions(kernel: CompiledKernel) -> list[str]:
    return [line for line in disassemble(kernel).splitlines() if line.lstrip().startswith("/*")]


@pytest.mark.parametrize(("name", "variant"), COMPILED, ids=lambda v: getattr(v, "name", v))
def test_every_variant_keeps_its_sums_in_registers_and_products_run_together(name, variant):
    kernel = compiled(name, variant)
    assert kernel.local_bytes == 0
    lines = instructions(kernel)
    waits, products = (sum(what in line for line in lines) for what in ("WARPGROUP.DEPBAR", "GMMA"))
    assert 2 * waits <= products, "products wait for each other"
    assert kernel.threads == 128 * (variant.warpgroups + 1)
    assert kernel.registers <= 65536 // kernel.threads
    assert kernel.shared_bytes <= HOPPER.max_shared_bytes
    assert kernel.cluster == variant.cluster


@pytest.mark.parametrize(
    ("name", "variant", "instruction"),
    [
        ("fp8", WIDE, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("fp8 swiglu", WIDE, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("fp8", SQUARE, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("fp8 rope", NARROW, "QGMMA.64x64x32.F32.E4M3.E4M3"),
        ("fp8", SLIM, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("bf16", LONG, "HGMMA.64x256x16.F32.BF16"),
        ("fp16 rope", SQUARE, "HGMMA.64x128x16.F32"),
    ],
)
def test_products_are_warpgroup_instructions_fed_by_bulk_copies(name, variant, instruction):
    lines = instructions(compiled(name, variant))
    products = [line for line in lines if "GMMA" in line]
    assert products and all(instruction in line for line in products)
    has_two_parts = name.startswith("fp8") and variant.wg_tiles == 1
    is_chain = not name.startswith("fp8")  # whose first chunk is apart
    # Where a chunk, four times 32 bytes, begins.
    places = 5 if has_two_parts else variant.wg_tiles * (1 + is_chain)
    assert len(products) == 4 * places
    copies = [line for line in lines if "UBLKCP" in line]
    assert copies and not any("MULTICAST" in line for line in copies)
    assert any("UTMALDG.2D" in line for line in lines)
    assert any("STSM" in line for line in lines)


@pytest.mark.parametrize("name", ["fp8 rope", "fp16 rope"])
def test_int8_caches_are_written_rounding_to_nearest_with_nan_as_0(name):
    """Every variant stores with the same PTX and has the registers that it has with an FP8 cache:
    here those with most, of each number of threads."""
    call, most = CALLS[name], {}
    for variant in sorted(variants_of(call), key=lambda its: compiled(name, its).registers):
        most[variant.warpgroups] = variant
    for variant in most.values():
        kernel = compile_kernel(prefill_spec(call, variant, limits("int8")))
        assert kernel.local_bytes == 0 and kernel.registers <= 65536 // kernel.threads
        found = re.findall(r"\bF2I\.\S+", "".join(instructions(kernel)))
        signed = [name for name in found if ".U" not in name]  # integers divide through unsigned
        # no suffix of a direction: to nearest even; NTZ: NaN to zero
        assert signed and set(signed) == {"F2I.NTZ"} and len(signed) % 8 == 0


def test_sums_are_stored_while_products_run():
    """Between a row tile's products and the wait for them lies the store of the other row tile."""
    lines = instructions(compiled("fp8", WIDE))
    marks = [
        kind
        for line in lines
        for word, kind in (("QGMMA", "p"), ("DEPBAR.LE gsb0, 0x0", "w"), ("STSM", "s"))
        if word in line
    ]
    runs = "".join(mark for i, mark in enumerate(marks) if i == 0 or mark != marks[i - 1])
    assert runs == "pswpsws"  # the last store follows the last unit


@pytest.mark.parametrize(
    ("name", "variant"),
    [("fp8", SLIM), ("fp8", SQUARE), ("fp8 swiglu", SQUARE), ("fp8 swiglu", NARROW)],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_part_is_added_while_the_products_of_the_next_run(name, variant):
    """No product is waited for before the next has begun, but for the first interval and the last
    chunk of a tile, each of which has two ways to its end."""
    lines = "".join(instructions(compiled(name, variant)))
    waits = re.findall(r"DEPBAR\.LE gsb0, (0x[01])", lines)
    assert waits.count("0x0") == 3 and waits.count("0x1") == 4


def test_a_step_of_more_tokens_than_the_small_kernels_take_is_one_launch_of_this_kernel():
    call = CALLS["fp8"]
    step = DeviceStep(*(meta(MAX_TOKENS, dtype=torch.int32) for _ in range(11)))
    env = LaunchEnv(step, meta(1), limits(), "tokens", lambda *_: meta(1))
    names = {spec.name for spec in kernels(call, limits())}
    for tokens in (129, 300, 2048):
        (launch,) = launches(call, env, StepShape(tokens, 1, 1, tokens, tokens))
        assert launch.spec.source == "ops/packed_linear/prefill.cu"
        assert launch.spec.name in names


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tokens", [65, 128, 1000, 2048])
def test_a_grid_fills_the_device_at_most_once(name, tokens):
    call = CALLS[name]
    step = DeviceStep(*(meta(MAX_TOKENS, dtype=torch.int32) for _ in range(11)))
    env = LaunchEnv(step, meta(1, 1), limits(), "tokens", lambda *_: meta(1))
    for variant in variants_of(call):
        launch = prefill_launch(call, env, tokens, variant)
        blocks = launch.grid[0]
        assert launch.grid[1:] == (1, 1)
        row_blocks, token_tiles = -(-4096 // variant.rows), -(-tokens // variant.tokens)
        if variant.is_even:  # as many of every token tile, each with a tile or more
            assert blocks == token_tiles * min(132 // token_tiles, row_blocks)
        else:
            assert blocks == min(132, row_blocks * token_tiles)
        assert len(launch.arguments) == len(launch.spec.arguments)
        tensor_map = launch.arguments[0]
        assert isinstance(tensor_map, TensorMap)
        assert tensor_map.box_rows == variant.tokens
        assert tensor_map.box_columns * call.inputs["x"].element_size() == 128


def test_blocks_have_equal_shares_where_whole_tiles_would_leave_many_without_work():
    rotates = make_call("packed_linear_rope_kv", FP8, BF16, rows=10240, inner=8192)
    assert choose(rotates, 256, 132) == EVEN_SQUARE  # 160 tiles
    assert choose(rotates, 192 + 1, 160) == SQUARE
    down = make_call("packed_linear", FP8, BF16, rows=4096, inner=14336)
    assert choose(down, 640, 132) == EVEN_SQUARE and choose(down, 512, 132) == SQUARE
    assert not choose(down, 2048, 132).is_even
    assert not choose(make_call("packed_linear", BF16, BF16, rows=8192), 300, 132).is_even


def test_a_step_may_have_more_token_tiles_than_there_are_multiprocessors():
    rotates = make_call("packed_linear_rope_kv", FP8, BF16, rows=10240, inner=8192)
    assert not choose(rotates, 132 * EVEN_SQUARE.tokens + 1, 132).is_even


def test_gate_and_up_of_few_tokens_leave_no_last_wave_nearly_empty():
    for rows, inner, wanted in ((57344, 8192, EVEN_NARROW), (28672, 4096, NARROW)):
        call = make_call("packed_linear_swiglu", FP8, FP8, rows=rows, inner=inner)
        assert choose(call, 64, 132) == wanted
        assert not choose(call, 65, 132).is_even


def test_steps_of_one_token_tile_take_one_with_room_for_few_more():
    for rows, inner in ((57344, 8192), (28672, 4096)):
        call = make_call("packed_linear_swiglu", FP8, FP8, rows=rows, inner=inner)
        for tokens, wanted in ((65, WIDE_96), (96, WIDE_96), (97, WIDE_120), (120, WIDE_120)):
            assert choose(call, tokens, 132) == wanted
        for tokens in (121, 128, 192, 240, 256):
            assert choose(call, tokens, 132) not in (WIDE_96, WIDE_120)
    logits = make_call("packed_linear", BF16, FP32, rows=128_256, inner=4096)
    best = replace(logits, attributes={"keeps_best": True})
    assert choose(best, 65, 132) == choose(best, 120, 132) == EVEN_120
    assert choose(best, 121, 132) == WIDE and not choose(best, 240, 132).is_even


def test_tiles_of_one_warpgroup_give_all_multiprocessors_work_for_few_tokens():
    for rows, inner, wanted in ((10240, 8192, EVEN_THIN), (6144, 4096, THIN)):
        rotates = make_call("packed_linear_rope_kv", FP8, BF16, rows=rows, inner=inner)
        assert choose(rotates, 64, 132) == choose(rotates, 33, 132) == wanted
        assert choose(rotates, 65, 132) not in (THIN, EVEN_THIN)
    assert choose(make_call("packed_linear", FP8, BF16, rows=8192, inner=8192), 64, 132) == THIN


def test_wide_tiles_wait_until_there_are_enough_of_them():
    call = make_call("packed_linear", FP8, BF16, rows=8192, inner=8192)
    assert choose(call, 96, 132) == SLIM
    assert choose(call, 256, 132) == SQUARE
    assert choose(call, 2048, 132) == WIDE
    assert choose(make_call("packed_linear", BF16, BF16, rows=8192), 2048, 132) == LONG
