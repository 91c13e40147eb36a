"""Matrix product: roles, sizes. The timed sizes are those of a Llama 3.2 1B layer and its head."""

from __future__ import annotations

from llmctl.plugins.core.op_rules import partial_sums, whole_leaves
from llmctl.plugins.core.op_spec import FP8, OpSpec, Role, Tolerance

_PAIRS = (  # activations, weights
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    (FP8, FP8),
    ("bfloat16", FP8),
)

SPEC = OpSpec(
    name="linear",
    inputs=(
        Role("x", ("T", FP8), ("N", "K")),
        Role("weight", ("T", FP8), ("O", "K")),
        Role("weight_scale", ("float32",), ("O",), optional=True),
        Role("x_scale", ("float32",), ("S",), optional=True),  # S: 1 or N
        Role("bias", ("T",), ("O",), optional=True),
    ),
    outputs=(Role("out", ("T", "float32"), ("N", "O")),),
    one_or={"S": "N"},
    # is_partial: K is a rank's share, and what follows the sum is all_reduce's. leaves: parts of K
    # that are added as a balanced tree, which ranks may divide among them without changing a bit.
    optional_attributes={"is_partial": bool, "leaves": int},
    rules=(partial_sums("weight", "x"), whole_leaves),
    tolerance={
        "float32": Tolerance(1e-5, 1e-4),
        "bfloat16": Tolerance(2**-7, 1e-3),
        "float16": Tolerance(2**-10, 1e-3),
    },
    cases=tuple(
        {
            "tokens": m,
            "outputs": o,
            "inner": k,
            "x_dtype": x_dtype,
            "dtype": weight_dtype,
            "x_scaling": "per_token" if m % 2 == 0 else "static",
            "bias": o % 2 == 1,
        }
        for m, o, k in (
            *((m, 37, 72) for m in range(1, 18)),
            (33, 131, 257),
            (200, 70, 80),
            (1, 1, 1),
            (3, 1000, 33),
            (13, 64, 1040),
            (40, 33, 2100),
        )
        for x_dtype, weight_dtype in _PAIRS
    )
    + tuple(  # a rank's share of K, and sums in an order that ranks may share
        {
            "tokens": m,
            "outputs": o,
            "inner": k,
            "x_dtype": x_dtype,
            "dtype": weight_dtype,
            "x_scaling": "static",
            "bias": False,
            "is_partial": is_partial,
            "leaves": leaves,
        }
        for m, o, k, leaves in ((1, 37, 128, 8), (9, 66, 224, 2), (33, 33, 2304, 4), (5, 7, 72, 1))
        for x_dtype, weight_dtype in _PAIRS
        for is_partial in (False, True)
    ),
    timed=tuple(
        {
            "tokens": m,
            "outputs": o,
            "inner": k,
            "x_dtype": dtype,
            "dtype": dtype,
            "x_scaling": "static",
            "bias": False,
        }
        for dtype in ("bfloat16", FP8)
        for o, k in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048))
        for m in (1, 5, 256)
        if not (o == 128256 and m == 256)
    ),
)
