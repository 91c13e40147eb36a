"""Query, key and value projections with rotary embedding and KV write: roles, sizes."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.plugins.core.op_rules import HEAD_RULES
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role
from llmctl.plugins.ops.packed_linear.forms import TILE_ROWS
from llmctl.plugins.ops.packed_linear.spec import (
    INPUTS,
    NORM_INPUTS,
    NORM_OUTPUTS,
    ONE_OR,
    OPTIONAL_ATTRIBUTES,
    RULES,
    TOLERANCE,
    block_sizes,
    inner_chunks,
    row_tiles,
)
from llmctl.plugins.schemes.table import FORMS

_CODED = tuple(form.name for form in FORMS.values() if form.is_coded)


def _rows(dims: Mapping[str, int]) -> int:
    return (dims["num_heads"] + 2 * dims["num_kv_heads"]) * dims["head_size"]


SPEC = OpSpec(
    name="packed_linear_rope_kv",
    inputs=(
        *INPUTS,
        *NORM_INPUTS,
        Role("rotary", ("float32",), ("P", "head_size")),
        Role("k_scale", ("float32",), ("1",), optional=True),
        Role("v_scale", ("float32",), ("1",), optional=True),
    ),
    outputs=(Role("q", ("T",), ("N", "q")), *NORM_OUTPUTS),
    attributes={"layer": int, "num_heads": int, "num_kv_heads": int, "head_size": int},
    optional_attributes=OPTIONAL_ATTRIBUTES,
    sizes=block_sizes,
    derived={
        "RT": lambda d: row_tiles(_rows(d)),
        "KT": inner_chunks,
        "rows": lambda d: row_tiles(_rows(d)) * TILE_ROWS,
        "q": lambda d: d["num_heads"] * d["head_size"],
    },
    one_or=ONE_OR,
    for_tokens=True,
    rules=(*RULES, *HEAD_RULES),
    tolerance=TOLERANCE,
    cases=tuple(
        {
            "requests": requests,
            "inner": 1056,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "dtype": dtype,
            "model_dtype": "bfloat16" if dtype in (FP8, *_CODED) else dtype,
            "kv_dtype": kv_dtype,
            "x_scaling": "static",
            "bias": size == 80,
        }
        for heads, kv_heads, size in ((4, 1, 64), (3, 2, 80), (2, 2, 96), (4, 2, 128))
        for requests in ("5+0", "1+70 4+9")  # new tokens + tokens cached before, per request
        for dtype, kv_dtype in (
            ("bfloat16", "bfloat16"),
            ("float16", "float16"),
            (FP8, "bfloat16"),
            (FP8, FP8),
            (FP8, "int8"),
            *((coded, FP8) for coded in _CODED),
            ("float16", "int8"),
        )
    ),
    timed=tuple(
        {
            "requests": requests,
            "inner": inner,
            "num_heads": heads,
            "num_kv_heads": 8,
            "head_size": size,
            "dtype": FP8,
            "model_dtype": "bfloat16",
            "kv_dtype": FP8,
            "x_scaling": "static",
            "bias": False,
        }
        for heads, size, inner in ((32, 64, 2048), (64, 128, 8192))
        for requests in ("1+500", "11+500")
    ),
)
