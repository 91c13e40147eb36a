"""Which variant of a packed product is chosen for how many tokens."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.kernel import compile_all
from support.packed_linear import FP8, LIMITS, VARIANTS, make_call, make_env

from llmctl.plugins.backends.cuda.kernel_spec import (
    StepShape,
    TensorMap,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.decode import (
    DecodeVariant,
    decode_launch,
    decode_spec,
    grid_blocks,
)
from llmctl.plugins.ops.packed_linear.kernel import kernels, launches
from llmctl.plugins.ops.packed_linear.tactics import (
    MANY,
    _table,
    choose_tactic,
    default_variant,
    parse_tactic,
)
from llmctl.plugins.schemes.table import FORMS


def test_a_variant_is_the_text_it_prints():
    for text in VARIANTS:
        assert str(DecodeVariant.parse(text)) == text
    with pytest.raises(ValueError):
        DecodeVariant.parse("n8r1")


def test_variants_that_a_weight_cannot_have_are_told_apart():
    def fits(text: str, tiles: int = 8, chunks: int = 16, is_fp8: bool = True) -> bool:
        return DecodeVariant.parse(text).fits(tiles, chunks, is_fp8)

    assert fits("n8r1c4s5k4g0f0")
    assert not fits("n8r1c4s5k4g0f0", is_fp8=False)  # a 16-bit sum is one chain
    assert not fits("n8r1c4s5k1g0f0", chunks=18)  # a slot would pass the end of K
    assert not fits("n8r1c1s5k4g0f0", chunks=8)  # two intervals for four blocks
    assert not fits("n8r2c1s5k0g0f0")  # shared tiles are handed on one by one
    assert not fits("n8r1c4s7k1g0f0")  # more shared memory than there is
    assert not fits("n12r1c1s5k1g0f0")
    assert fits("n8r1c4s5k1g0f5") and not fits("n8r1c4s5k1g0f6")  # more slots than there are
    assert not fits("n8r1c1s5k1g0f1+norm8")  # the blocks have no tokens to wait for
    assert fits("n8r1c1s5k1g0f0+norm8")
    assert not fits("n8r1c1s5k1g0f0+norm12")  # a row has eight parts
    assert not fits("n16r1c1s5k1g0f0+norm8")
    assert fits("n8r1c4s5k1g0f0+pair")
    for text in ("n8r1c4s5k2g0f0", "n8r1c4s5k0g0f0", "n8r1c4s5k1g0f1", "n8r1c1s5k1g0f0+norm8"):
        assert not fits(text + "+pair")  # blocks that share weights share nothing else
    assert fits("n8r1c4s5k1g0f1+ahead4") and fits("n8r1c4s5k1g8f1+ahead4")
    assert not fits("n8r1c4s5k1g0f1+ahead8")  # no row tiles are left for later blocks
    for text in ("n8r1c4s5k1g0f0", "n8r1c4s5k2g0f1", "n8r2c1s5k1g0f1", "n8r1c4s5k1g4f1"):
        assert not fits(text + "+ahead4")  # one row tile to a block, weights before tokens


@pytest.mark.parametrize("dtype", FORMS)
def test_the_rule_gives_variants_that_fit_and_the_table_too(dtype):
    is_fp8 = FORMS[dtype].numbers == "float8_e4m3fn"
    for tiles in (1, 7, 32, 48, 64, 96, 128, 160, 256, 448, 896, 2004):
        for chunks in (1, 2, 16, 18, 32, 64, 112, 224):
            for tokens in (8, 16, 32, 64):
                variant = default_variant(tokens, tiles, chunks, dtype)
                assert variant.stages >= min(3, chunks)
                assert variant.fits(tiles, chunks, is_fp8), (tiles, chunks, variant)
    for key, entries in _table().items():
        tiles, chunks = map(int, key.split()[1].split("x"))
        for most, text in entries.items():
            if text == MANY:
                continue
            variant = DecodeVariant.parse(text, FORMS[key.split()[2]])
            assert variant.fits(tiles, chunks, True)
            token_tiles = -(-int(most) // variant.tokens)  # several only where all run at once
            assert token_tiles == 1 or token_tiles * grid_blocks(variant, tiles, 132) <= 132


def test_rows_are_shared_evenly_between_blocks():
    whole = DecodeVariant.parse("n8r1c1s12k1g0f0")
    assert grid_blocks(whole, 896, 132) == 128  # seven tiles each
    assert grid_blocks(whole, 128, 132) == 128
    assert grid_blocks(DecodeVariant.parse("n8r1c1s12k0g0f0"), 160, 132) == 132
    assert grid_blocks(DecodeVariant.parse("n8r1c1s12k0g0f0"), 6, 132) == 6
    assert grid_blocks(DecodeVariant.parse("n8r2c1s12k4g0f0"), 33, 132) == 68  # 17 clusters


def test_a_step_launches_the_entry_of_its_tokens():
    call = make_call("packed_linear", FP8)
    env = make_env()
    specs = {spec.name for spec in kernels(call, LIMITS)}
    for tokens in (1, 8, 9, 16, 17, 64, 65, 256):
        (launch,) = launches(call, env, StepShape(tokens, 1, 1, tokens, tokens))
        assert launch.spec.name in specs
        few = [int(n) for n in re.findall(r"\.few\.n(\d+)", launch.spec.name)]
        assert few == [n for n in (8, 16, 32, 64) if n >= tokens][:1]
        x_map = launch.arguments[0]
        assert isinstance(x_map, TensorMap)
        if few:  # rows that the step has not are not even read
            assert x_map.box_rows == tokens
        assert len(launch.arguments) == len(launch.spec.arguments)


def test_pairs_of_blocks_have_a_token_tile_each():
    call = replace(make_call("packed_linear", FP8), tactic="256:n16r1c4s5k1g0f0+pair;*:many")
    for tokens, rows in ((1, 1), (16, 1), (17, 1), (32, 1), (33, 2)):
        (launch,) = launches(call, make_env(), StepShape(tokens, 1, 1, tokens, tokens))
        assert launch.spec.cluster == launch.spec.constants["SHARERS"] == 2
        assert launch.grid == (2 * call.inputs["weight"].shape[0], rows, 1)


def test_a_stored_tactic_is_obeyed():
    call = make_call("packed_linear", FP8)
    call = OpCall(call.op, call.name, call.inputs, call.outputs, {}, "4:n8r2c1s3k1g0f0;*:many")
    first, *rest = kernels(call, LIMITS)
    assert ".n8r2c1s3." in first.name and rest and all(".many." in spec.name for spec in rest)
    (launch,) = launches(call, make_env(), StepShape(4, 1, 1, 4, 4))
    assert launch.spec == first


def test_equal_calls_of_different_sizes_share_a_binary():
    variant = DecodeVariant.parse("n8r1c4s5k0g0f0")
    small, large = make_call("packed_linear", FP8), make_call("packed_linear", FP8, 64, 8192)
    assert decode_spec(small, variant, LIMITS) == decode_spec(large, variant, LIMITS)
    split = DecodeVariant.parse("n8r1c1s4k2g0f0")
    names = {decode_spec(call, split, LIMITS).name for call in (small, large)}
    assert len(names) == 2  # room for the parts depends on K


def test_sums_are_handed_on_through_scratch_only_where_tiles_are_shared():
    call, env = make_call("packed_linear", FP8), make_env()
    even = decode_launch(call, env, 3, DecodeVariant.parse("n8r1c4s5k0g0f0"))
    whole = decode_launch(call, env, 3, DecodeVariant.parse("n8r1c4s5k1g0f0"))
    assert even.spec.arguments == (*whole.spec.arguments, "*fp32", "*i32")
    assert even.spec.name != whole.spec.name


def test_tactics_cover_any_number_of_tokens():
    entries = parse_tactic(choose_tactic("packed_linear", 128, 65, "float8_e4m3fn"))
    assert [most for most, _ in entries] == [8, 16, 32, 64, 1 << 31]
    assert entries[-1][1] == "many"
    measured = parse_tactic(choose_tactic("packed_linear", 128, 64, "float8_e4m3fn"))
    assert [most for most, _ in measured] == [8, 12, 16, 24, 32, 64, 1 << 31]  # as the table has it
    table = choose_tactic("packed_linear_swiglu", 256, 16, "float8_e4m3fn")
    assert parse_tactic(table)[0] == (8, _table()["packed_linear_swiglu 256x16 float8_e4m3fn"]["8"])


def with_norm(call: OpCall) -> OpCall:
    """The same product of tokens that it has to normalize."""
    x = call.inputs["x"]
    with torch.device("meta"):
        rows, dtype = tuple(x.shape), torch.bfloat16 if x.dtype == FP8 else x.dtype
        inputs = {**call.inputs, "x": torch.empty(rows, dtype=dtype)}
        inputs["residual"] = torch.empty(rows, dtype=dtype)
        inputs["norm_weight"] = torch.empty(rows[1], dtype=dtype)
        made = {"normal": torch.empty(rows, dtype=x.dtype)}
        made["residual_out"] = torch.empty(rows, dtype=dtype)
    attributes = {**call.attributes, "epsilon": 1e-5}
    return OpCall(call.op, call.name, inputs, {**call.outputs, **made}, attributes, call.tactic)


def test_products_that_normalize_compile_without_spills_and_copy_no_tokens():
    """All of them at once, as a call of the disassembler takes longer than a kernel's text."""
    specs = []
    for key, entry in _table().items():
        text = next((v for v in entry.values() if "norm" in v), None)
        if text is not None:
            op, size, _ = key.split()
            tiles, chunks = map(int, size.split("x"))
            call = with_norm(make_call(op, FP8, 64 * tiles, 128 * chunks))
            specs.append(decode_spec(call, DecodeVariant.parse(text), LIMITS))
    assert specs
    for spec, kernel, code in compile_all(specs):
        assert kernel.local_bytes == 0, spec.name
        assert "QGMMA" in code and "UBLKCP" in code and "UTMALDG" not in code, spec.name


def test_few_tokens_are_normalized_by_the_product_and_more_by_rms_norm():
    call = with_norm(make_call("packed_linear_swiglu", FP8, 64 * 256, 2048))
    names = {spec.name for spec in kernels(call, LIMITS)}
    for tokens, wanted in ((1, ["few"]), (2, ["rms_norm", "few"]), (256, ["rms_norm", "many"])):
        found = launches(call, make_env(), StepShape(tokens, 1, 1, tokens, tokens))
        assert len(found) == len(wanted)
        for launch, word in zip(found, wanted, strict=True):
            assert launch.spec.name in names and word in launch.spec.name
            assert len(launch.arguments) == len(launch.spec.arguments)


def test_a_product_without_a_norm_takes_no_variant_that_normalizes():
    plain = make_call("packed_linear_swiglu", FP8, 64 * 256, 2048)
    assert not any("norm" in spec.name for spec in kernels(plain, LIMITS))
