"""The CUDA kernels of packed products: what they compile to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.kernel import compile_all
from support.packed_linear import FOUR_BITS, FP8, LIMITS, VARIANTS, make_call, make_env

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import (
    StepShape,
)
from llmctl.plugins.ops.packed_linear.decode import (
    SHARED_HALF,
    DecodeVariant,
    decode_spec,
)
from llmctl.plugins.ops.packed_linear.kernel import kernels, launches
from llmctl.plugins.schemes.table import MXFP4

VARIANTS_OF_FOUR_BITS = (
    "n8r1c2s5k1g0f2",
    "n8r2c1s6k1g0f0",
    "n16r1c2s5k0g0f1",
    "n24r1c2s6k1g0f0",
    "n32r1c2s4k1g0f0",
    "n48r1c1s6k1g0f0",
    "n64r1c1s6k0g0f0",
    "n8r1c1s11k4g0f0",
    "n16r1c2s4k2g0f0",
)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv"])
def test_every_variant_compiles_to_warpgroup_products_that_run_together_without_spills(op, dtype):
    call = make_call(op, dtype)
    wanted = "QGMMA" if dtype == FP8 else "HGMMA"
    parsed = map(DecodeVariant.parse, VARIANTS if op == "packed_linear" else VARIANTS[:3])
    plain = [variant for variant in parsed if not variant.normalizes]
    fitting = [v for v in plain if v.fits(*call.inputs["weight"].shape[:2], dtype == FP8)]
    # only FP8 sums can be divided over a cluster
    assert all(variant.split > 1 for variant in plain if variant not in fitting)
    specs = [decode_spec(call, variant, LIMITS) for variant in fitting]
    for variant, (spec, kernel, code) in zip(fitting, compile_all(specs), strict=True):
        assert kernel.local_bytes == 0, spec.name
        products = re.findall(r"\b[QH]GMMA\.64x(\d+)x", code)
        assert products and set(products) == {str(variant.tokens)}, spec.name
        assert wanted in code and "HMMA." not in code.replace("HGMMA.", ""), spec.name
        waits = re.findall(r"WARPGROUP\.DEPBAR", code)
        assert 2 * len(waits) <= len(products), f"{spec.name}: products wait for each other"
        assert "UBLKCP" in code and "UTMALDG" in code, spec.name
        copies = re.findall(r"UBLKCP\S*", code)
        assert all(("MULTICAST" in copy) == variant.pairs for copy in copies), spec.name
        assert kernel.cluster == max(variant.split, 1) * variant.sharers
        blocks = 2 if variant.shared_bytes(64) <= SHARED_HALF else 1
        assert kernel.registers * kernel.threads * blocks <= 65536


@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv"])
def test_four_bits_are_multiplied_from_registers_and_no_product_waits_for_another(op):
    """ptxas puts a wait behind every product whose registers it cannot keep."""
    call = make_call(op, FOUR_BITS)
    texts = VARIANTS_OF_FOUR_BITS if op == "packed_linear" else VARIANTS_OF_FOUR_BITS[:3]
    variants = [DecodeVariant.parse(text, MXFP4.forms[0]) for text in texts]
    specs = [decode_spec(call, variant, LIMITS) for variant in variants]
    for variant, (_, kernel, code) in zip(variants, compile_all(specs), strict=True):
        text = str(variant)
        assert variant.fits(*call.inputs["weight"].shape[:2], is_fp8=True)
        products = re.findall(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code)
        assert products and set(products) == {str(variant.tokens)}, text
        waits = re.findall(r"WARPGROUP\.DEPBAR", code)
        assert len(waits) * 8 <= len(products), text
        assert kernel.local_bytes == 0, text
        blocks = 2 if variant.shared_bytes(64) <= SHARED_HALF and variant.row_tiles == 1 else 1
        assert kernel.registers * kernel.threads * blocks <= 65536


def test_many_tokens_meet_four_bits_as_fp8_in_scratch_memory():
    call, env = make_call("packed_linear_swiglu", FOUR_BITS, 1024, 1040), make_env()
    names = {spec.name for spec in kernels(call, LIMITS)}
    expand, product = launches(call, env, StepShape(256, 1, 1, 256, 256))
    assert {expand.spec.name, product.spec.name} <= names
    assert "expanded" in product.spec.name and product.spec.constants["EXPANDED"] == 1
    weight, made = expand.arguments
    assert weight is call.inputs["weight"] and made is product.arguments[1]
    assert made.shape == (16, 10, 64, 128) and made.dtype == FP8
    assert expand.grid == (5, 16, 1)
    assert compile_kernel(expand.spec).local_bytes == 0


@pytest.mark.parametrize("dtype", [FP8, torch.float16])
def test_int8_keys_and_values_round_to_nearest_and_compile_without_spills(dtype):
    """By the smallest variant and those with most registers, of one row tile and of two: all store
    with the same PTX, and have the registers that they have with an FP8 cache."""
    call, limits = make_call("packed_linear_rope_kv", dtype), replace(LIMITS, kv_dtype="int8")
    variants = map(DecodeVariant.parse, ("n8r1c4s5k1g0f0", "n16r2c2s5k1g0f2", "n32r1c2s8k1g0f0"))
    for _, kernel, code in compile_all([decode_spec(call, v, limits) for v in variants]):
        assert kernel.local_bytes == 0
        found = re.findall(r"\bF2I\.\S+", code)
        signed = [name for name in found if ".U" not in name]  # integers divide through unsigned
        # no suffix of a direction: to nearest even; NTZ: NaN to zero
        assert signed and set(signed) == {"F2I.NTZ"}
