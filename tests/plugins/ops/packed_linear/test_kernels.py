"""The CUDA kernels of packed products: what they compile to."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.kernel import compile_all
from support.packed_linear import (
    FOUR_BITS,
    FP8,
    LIMITS,
    OF_FOUR_BITS_HERE,
    VARIANTS_HERE,
    make_call,
    make_env,
    require_products_from_registers,
    require_products_of_warpgroups,
)

from llmctl.plugins.backends.cuda.compiler import compile_kernel
from llmctl.plugins.backends.cuda.kernel_spec import (
    StepShape,
)
from llmctl.plugins.ops.packed_linear.decode import (
    DecodeVariant,
    decode_spec,
)
from llmctl.plugins.ops.packed_linear.kernel import kernels, launches


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv"])
def test_every_variant_compiles_to_warpgroup_products_that_run_together_without_spills(op, dtype):
    require_products_of_warpgroups(op, dtype, VARIANTS_HERE[op])


@pytest.mark.parametrize("op", ["packed_linear", "packed_linear_swiglu", "packed_linear_rope_kv"])
def test_four_bits_are_multiplied_from_registers_and_no_product_waits_for_another(op):
    require_products_from_registers(op, OF_FOUR_BITS_HERE[op])


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
    """By the variants with most registers, of one row tile and of two: all store with the same PTX,
    and have the registers that they have with an FP8 cache."""
    call, limits = make_call("packed_linear_rope_kv", dtype), replace(LIMITS, kv_dtype="int8")
    variants = map(DecodeVariant.parse, ("n16r2c2s5k1g0f2", "n32r1c2s8k1g0f0"))
    for _, kernel, code in compile_all([decode_spec(call, v, limits) for v in variants]):
        assert kernel.local_bytes == 0
        found = re.findall(r"\bF2I\.\S+", code)
        signed = [name for name in found if ".U" not in name]  # integers divide through unsigned
        # no suffix of a direction: to nearest even; NTZ: NaN to zero
        assert signed and set(signed) == {"F2I.NTZ"}
        # Attention reads what earlier steps cached as soon as this lets it start.
        before = re.findall(r"ACQBULK|EXIT", code.split("PREEXIT")[0])
        assert before[-1] == "ACQBULK", "others start before what they read is written"
