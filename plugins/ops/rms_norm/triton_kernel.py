"""RMS normalization: one thread block per row, so a row's sum has one order whatever the step."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.quantize.triton_kernel import write_row


@triton.jit
def inverse_rms(sum_of_squares, width, epsilon):
    """1 / sqrt(mean + epsilon), by the hardware's reciprocal square root."""
    return tl.rsqrt(tl.math.div_rn(sum_of_squares, width) + epsilon)


@triton.jit
def normalize_row(values, factors, epsilon, HIDDEN: tl.constexpr, dtype: tl.constexpr):
    """values / rms(values) * factors, rounded to the model's type where the reference rounds, as
    float32. Elements outside the row must be 0."""
    wide = values.to(tl.float32)
    inverse = inverse_rms(tl.sum(wide * wide, axis=0), 1.0 * HIDDEN, epsilon)
    normal = (wide * inverse).to(dtype).to(tl.float32)
    return (factors.to(tl.float32) * normal).to(dtype).to(tl.float32)


@triton.jit
def rms_norm(
    x,
    weight,
    residual,
    scale,
    out,
    residual_out,
    out_scale,
    epsilon,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_RESIDUAL_OUT: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    offsets = tl.arange(0, BLOCK)
    mask = offsets < HIDDEN
    # Constants are read while the kernel before this one still runs.
    factors = tl.load(weight + offsets, mask=mask, other=0)
    divisor = 1.0
    if STATIC_SCALE:
        divisor = tl.load(scale)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = row * HIDDEN
    values = tl.load(x + first + offsets, mask=mask, other=0)
    dtype: tl.constexpr = x.dtype.element_ty
    if HAS_RESIDUAL:
        added = tl.load(residual + first + offsets, mask=mask, other=0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(dtype)
    if HAS_RESIDUAL_OUT:
        tl.store(residual_out + first + offsets, values, mask=mask)
    product = normalize_row(values, factors, epsilon, HIDDEN, dtype)
    write_row(out + first, out_scale, row, offsets, mask, product, divisor, PER_TOKEN)
