"""Rotary embedding and KV write: roles, sizes."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import HEAD_RULES, NORM_LIMITS, together
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role

_HEADS = ((7, 1, 64), (4, 2, 80), (6, 6, 96), (8, 2, 128), (2, 1, 18))

SPEC = OpSpec(
    name="rope_kv_write",
    inputs=(
        Role("qkv", ("T",), ("N", "qkv")),
        Role("rotary", ("float32",), ("P", "head_size")),
        Role("q_norm", ("T",), ("head_size",), optional=True),
        Role("k_norm", ("T",), ("head_size",), optional=True),
        Role("k_scale", ("float32",), ("1",), optional=True),
        Role("v_scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(Role("q", ("T",), ("N", "q")),),
    attributes={
        "layer": int,
        "num_heads": int,
        "num_kv_heads": int,
        "head_size": int,
        "epsilon": float,
    },
    derived={
        "qkv": lambda d: (d["num_heads"] + 2 * d["num_kv_heads"]) * d["head_size"],
        "q": lambda d: d["num_heads"] * d["head_size"],
    },
    for_tokens=True,
    rules=(*HEAD_RULES, together("q_norm", "k_norm"), NORM_LIMITS),
    cases=tuple(
        {
            "requests": requests,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "qk_norm": size in (80, 128),
        }
        for heads, kv_heads, size in _HEADS
        for requests in ("5+0", "1+70 4+9")  # new tokens + tokens cached before, per request
        for dtype, kv_dtype in (
            ("float32", "float32"),
            ("bfloat16", "bfloat16"),
            ("bfloat16", FP8),
            ("float16", "float16"),
            ("bfloat16", "int8"),
            ("float16", "int8"),
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
            "qk_norm": False,
        }
        for requests in ("1+500", "256+0")
        for kv_dtype in ("bfloat16", FP8)
    ),
)
