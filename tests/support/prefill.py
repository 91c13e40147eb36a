"""The packed products of many tokens: calls of each kind, and what their binaries must be.

CI compiles of each call and each arrangement of warps the one with most tokens to a tile, which has
most registers. All of them are compiled where there are more cores than two, on the machine with
the GPU (tests/gpu/test_builds_compiled.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from llmctl.plugins.backends.cuda.arch import HOPPER
from llmctl.plugins.backends.cuda.compiler import CompiledKernel
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear.layout import packed_shape
from llmctl.plugins.ops.packed_linear.prefill import Variant, prefill_spec, variants_of
from support.kernel import compile_all

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


def largest(variants: Sequence[Variant]) -> list[Variant]:
    """Of each number of warps, row tiles of one and shares the one with most tokens."""
    ordered = sorted(variants, key=lambda its: its.tokens)
    return [*{(its.warpgroups, its.wg_tiles, its.is_even): its for its in ordered}.values()]


@cache
def compiled(name: str) -> dict[Variant, tuple[CompiledKernel, list[str]]]:
    """The binaries of a call's `largest`, and their instructions."""
    return compile_variants(name, largest(variants_of(CALLS[name])))


def compile_variants(
    name: str, variants: Sequence[Variant], kv_dtype: str = "float8_e4m3fn"
) -> dict[Variant, tuple[CompiledKernel, list[str]]]:
    """Binaries of a call of `CALLS`, and their instructions."""
    specs = [prefill_spec(CALLS[name], variant, limits(kv_dtype)) for variant in variants]
    return {
        variant: (kernel, [line for line in code.splitlines() if line.lstrip().startswith("/*")])
        for variant, (_, kernel, code) in zip(variants, compile_all(specs), strict=True)
    }


def require_sums_in_registers(variant: Variant, kernel: CompiledKernel, lines: list[str]) -> None:
    """Nothing is spilled, products run together, and the launch has room."""
    assert kernel.local_bytes == 0, kernel.name
    waits, products = (sum(what in line for line in lines) for what in ("WARPGROUP.DEPBAR", "GMMA"))
    assert 2 * waits <= products, f"{kernel.name}: products wait for each other"
    assert kernel.threads == 128 * (variant.warpgroups + 1)
    assert kernel.registers <= 65536 // kernel.threads
    assert kernel.shared_bytes <= HOPPER.max_shared_bytes
    assert kernel.cluster == variant.cluster
