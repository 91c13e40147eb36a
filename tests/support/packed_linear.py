"""Calls of packed products of known shapes."""

from __future__ import annotations

import torch

from llmctl.plugins.backends.cuda.kernel_spec import (
    DeviceStep,
    LaunchEnv,
    StepLimits,
)
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.layout import packed_shape

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
