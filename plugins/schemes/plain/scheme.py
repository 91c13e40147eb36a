"""Weights that are not quantized: BF16 and FP16 on GPUs, float32 too on a CPU."""

from __future__ import annotations

from llmctl.plugins.schemes.scheme import Form, WeightScheme

SCHEME = WeightScheme(
    name="plain",
    title="16 bits",
    weight_bytes=2.0,
    forms=tuple(
        Form(name=dtype, dtype=dtype, numbers=dtype, word=word, block_bytes=8192, columns=64)
        for dtype, word in (("bfloat16", "bf16"), ("float16", "fp16"))
    ),
)
