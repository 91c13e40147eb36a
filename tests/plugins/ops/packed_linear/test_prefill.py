"""The packed products of many tokens, compiled: instructions, registers, tile shapes, grids."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.prefill import (
    BF16,
    CALLS,
    FP8,
    FP32,
    MAX_TOKENS,
    compile_variants,
    compiled,
    largest,
    limits,
    make_call,
    meta,
    require_sums_in_registers,
)

from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    LaunchEnv,
    StepShape,
    TensorMap,
)
from llmctl.plugins.ops.packed_linear.kernel import kernels, launches
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
    choose,
    prefill_launch,
    variants_of,
)


@pytest.mark.parametrize("name", CALLS)
def test_sums_stay_in_registers_and_products_run_together(name):
    for variant, (kernel, lines) in compiled(name).items():
        require_sums_in_registers(variant, kernel, lines)


def test_each_arrangement_of_warps_is_compiled_with_most_tokens():
    assert set(largest(variants_of(CALLS["fp8"]))) == {WIDE, SQUARE, EVEN_SQUARE, SLIM}
    assert largest(variants_of(CALLS["bf16"])) == [LONG]


@pytest.mark.parametrize(
    ("name", "variant", "instruction"),
    [
        ("fp8", WIDE, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("fp8 swiglu", WIDE, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("fp8", SQUARE, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("fp8 rope", THIN, "QGMMA.64x64x32.F32.E4M3.E4M3"),
        ("fp8", SLIM, "QGMMA.64x128x32.F32.E4M3.E4M3"),
        ("bf16", LONG, "HGMMA.64x256x16.F32.BF16"),
        ("fp16 rope", LONG, "HGMMA.64x256x16.F32"),
    ],
)
def test_products_are_warpgroup_instructions_fed_by_bulk_copies(name, variant, instruction):
    _, lines = compiled(name)[variant]
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
    binaries, most = compiled(name), {}
    for variant in sorted(binaries, key=lambda its: binaries[its][0].registers):
        most[variant.warpgroups] = variant
    for kernel, lines in compile_variants(name, [*most.values()], "int8").values():
        assert kernel.local_bytes == 0 and kernel.registers <= 65536 // kernel.threads
        found = re.findall(r"\bF2I\.\S+", "".join(lines))
        signed = [name for name in found if ".U" not in name]  # integers divide through unsigned
        # no suffix of a direction: to nearest even; NTZ: NaN to zero
        assert signed and set(signed) == {"F2I.NTZ"} and len(signed) % 8 == 0


def test_sums_are_stored_while_products_run():
    """Between a row tile's products and the wait for them lies the store of the other row tile."""
    _, lines = compiled("fp8")[WIDE]
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
    [("fp8", SLIM), ("fp8", SQUARE), ("fp8 swiglu", SQUARE), ("fp8 rope", THIN)],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_part_is_added_while_the_products_of_the_next_run(name, variant):
    """No product is waited for before the next has begun, but for the first interval and the last
    chunk of a tile, each of which has two ways to its end."""
    lines = "".join(compiled(name)[variant][1])
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
