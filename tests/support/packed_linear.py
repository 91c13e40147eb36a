"""Calls of packed products of known shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    LaunchEnv,
    StepLimits,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.decode import SHARED_HALF, DecodeVariant, decode_spec
from llmctl.plugins.ops.packed_linear.layout import packed_shape
from llmctl.plugins.schemes.table import MXFP4
from support.kernel import compile_all

FP8 = torch.float8_e4m3fn


FOUR_BITS = torch.uint8  # MXFP4, packed


LIMITS = StepLimits(256, 64, 8, 4096, 10, 32, "float8_e4m3fn")


HEADS = {"layer": 0, "num_heads": 8, "num_kv_heads": 2, "head_size": 64}


VARIANTS = (
    "n8r1c4s5k1g0f0",
    "n8r2c4s3k1g0f0",
    "n16r1c4s5k0g0f1",
    "n16r2c2s5k1g0f2",
    "n16r1c4s5k1g0f2+ahead4",
    "n24r1c2s8k1g0f0",
    "n24r2c2s5k1g0f2",
    "n32r1c2s8k1g0f0",
    "n48r1c2s7k1g0f0",
    "n64r1c2s6k0g0f0",
    "n64r1c2s6k1g0f0+pair",
    "n8r1c1s11k4g0f0",
    "n16r1c2s4k2g0f0",
    "n8r1c2s4k2g0f0+norm8",
)
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
# Of these CI compiles, for plain products and for others, those with most to do of each kind: two
# row tiles, equal shares, most tokens, pairs, loading ahead, clusters. The rest is compiled where
# there are more cores than two, on the machine with the GPU (tests/gpu/test_builds_compiled.py).
VARIANTS_HERE = {
    "packed_linear": (
        "n16r1c4s5k1g0f2+ahead4",
        "n24r2c2s5k1g0f2",
        "n64r1c2s6k0g0f0",
        "n64r1c2s6k1g0f0+pair",
        "n8r1c1s11k4g0f0",
    ),
    "packed_linear_swiglu": ("n8r2c4s3k1g0f0", "n16r1c4s5k0g0f1"),
    "packed_linear_rope_kv": ("n8r2c4s3k1g0f0", "n16r1c4s5k0g0f1"),
}
OF_FOUR_BITS_HERE = {
    "packed_linear": ("n8r2c1s6k1g0f0", "n48r1c1s6k1g0f0", "n64r1c1s6k0g0f0", "n8r1c1s11k4g0f0"),
    "packed_linear_swiglu": ("n8r2c1s6k1g0f0",),
    "packed_linear_rope_kv": ("n8r2c1s6k1g0f0",),
}


def make_call(op: str, dtype: torch.dtype, rows: int = 768, inner: int = 2048, out=None) -> OpCall:
    """A call on meta tensors."""
    x_dtype = FP8 if dtype == FOUR_BITS else dtype
    model = torch.bfloat16 if x_dtype == FP8 else dtype
    shape = packed_shape(rows, inner, x_dtype.itemsize)
    if dtype == FOUR_BITS:
        shape = (-(-rows // 64), -(-inner // 256), 64, 136)
    with torch.device("meta"):
        x = torch.empty(256, inner, dtype=x_dtype)
        inputs = {"x": x, "weight": torch.empty(shape).to(dtype)}
        if x_dtype == FP8:
            inputs["weight_scale"] = torch.empty(shape[0] * 64)
            inputs["x_scale"] = torch.empty(1)
        attributes: dict = {}
        outputs = {"out": torch.empty(256, rows, dtype=out or model)}
        if op == "packed_linear_swiglu":
            outputs = {"out": torch.empty(256, rows // 2, dtype=out or x_dtype)}
            attributes = {"dtype": str(model).removeprefix("torch.")}
            if x_dtype == FP8:
                inputs["scale"] = torch.empty(1)
        if op == "packed_linear_rope_kv":
            outputs = {"q": torch.empty(256, 512, dtype=model)}
            inputs["rotary"] = torch.empty(4096, 64)
            attributes = HEADS
    attributes = attributes | ({"scheme": "mxfp4"} if dtype == FOUR_BITS else {})
    return OpCall(op, op, inputs, outputs, attributes)


def make_env(kv_dtype: torch.dtype = FP8) -> LaunchEnv:
    ints = torch.empty(256, dtype=torch.int32, device="meta")
    step = DeviceStep(*[ints] * 11)
    cache = torch.empty(1, 4, 2, 2, 32, 64, dtype=kv_dtype, device="meta")

    def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return LaunchEnv(step, cache, LIMITS, "tokens", scratch)


def require_products_of_warpgroups(op: str, dtype: torch.dtype, texts: Sequence[str]) -> None:
    """Tensor cores multiply, products run together, nothing spills."""
    call = make_call(op, dtype)
    wanted = "QGMMA" if dtype == FP8 else "HGMMA"
    parsed = map(DecodeVariant.parse, texts)
    plain = [variant for variant in parsed if not variant.normalizes]
    tiles, chunks = call.inputs["weight"].shape[:2]
    fitting = [v for v in plain if v.fits(tiles, chunks, dtype == FP8)]
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


def require_products_from_registers(op: str, texts: Sequence[str]) -> None:
    """ptxas puts a wait behind every product whose registers it cannot keep."""
    call = make_call(op, FOUR_BITS)
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
