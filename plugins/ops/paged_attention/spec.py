"""Paged attention: roles, sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmctl.plugins.core.op_rules import HEAD_RULES, even_groups, scales_output, within
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role, Tolerance
from llmctl.plugins.ops.paged_attention.fp8_context import Fp8Tokens, fp8_tokens

if TYPE_CHECKING:
    from llmctl.plugins.core.calls import OpCall

_HEADS = ((7, 1, 64), (4, 2, 80), (6, 6, 96), (8, 2, 128), (2, 1, 18))
_REQUESTS = (  # new tokens + tokens cached before, per request
    "1+0",
    "37+0",
    "5+31 1+95 1+0",
    "40+33 3+64",
)


def _generation_with_context(call: OpCall) -> str | None:
    """Kernels for one token have the arithmetic of those for prompts."""
    of_generation = call.attributes.get("fp8_generation", False)
    if not of_generation or fp8_tokens(call.attributes) is Fp8Tokens.ALL:
        return None
    return "has fp8_generation without fp8_context"


SPEC = OpSpec(
    name="paged_attention",
    inputs=(
        Role("q", ("T",), ("N", "q")),
        Role("k_scale", ("float32",), ("1",), optional=True),
        Role("v_scale", ("float32",), ("1",), optional=True),
        Role("out_scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(Role("out", ("T", FP8), ("N", "q")),),
    attributes={
        "layer": int,
        "num_heads": int,
        "num_kv_heads": int,
        "head_size": int,
        "softmax_scale": float,
        "window": int,
    },
    # ends_only: `out` is read only where tokens get logits, the last ones of a request; elsewhere
    # it may hold anything.
    # fp8_context, fp8_generation: whose tokens have FP8 products (fp8_context.py).
    optional_attributes={
        "sink_tokens": int,
        "fp8_context": bool,
        "fp8_generation": bool,
        "ends_only": bool,
    },
    for_tokens=True,
    rules=(
        *HEAD_RULES,
        even_groups,
        within("softmax_scale", 0.0, 1.0),
        within("window", 0, 2**31 - 1),
        within("sink_tokens", 0, 2**31 - 1),
        scales_output("out", "out_scale"),
        _generation_with_context,
    ),
    derived={"q": lambda d: d["num_heads"] * d["head_size"]},
    tolerance={
        "float32": Tolerance(1e-5, 2e-6),
        "bfloat16": Tolerance(2**-7, 1e-5),
        "float16": Tolerance(2**-10, 1e-5),
        FP8: Tolerance(2**-3, 2**-9),
        "int8": Tolerance(0.0, 0.0),  # the cache, which is only read
    },
    cases=tuple(
        {
            "requests": requests,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "window": window,
            "quantize_out": kv_dtype == FP8,
            "tokens_per_block": tokens_per_block,
        }
        for heads, kv_heads, size in _HEADS
        for requests, window, tokens_per_block in zip(
            (*_REQUESTS, "40+33 3+64"), (0, 0, 0, 0, 24), (32, 16, 64, 32, 8), strict=True
        )
        for dtype, kv_dtype in (
            ("float32", "float32"),
            ("bfloat16", "bfloat16"),
            ("bfloat16", FP8),
            ("float16", "float16"),
            ("bfloat16", "int8"),
        )
    ),
    timed=tuple(
        {
            "requests": requests,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_size": 64,
            "dtype": "bfloat16",
            "kv_dtype": kv_dtype,
            "window": 0,
            "quantize_out": False,
            "tokens_per_block": 32,
        }
        for requests in ("1+500", "5+500", "1+4000", "256+0", "512+1536")
        for kv_dtype in ("bfloat16", FP8)
    ),
)
