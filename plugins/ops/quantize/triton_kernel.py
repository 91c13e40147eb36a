"""FP8 quantization of rows, and the output stage that the row-wise kernels share.

Rounds as reference.py: a true division, saturation to +-448 with NaN kept, nearest even. A row's
scale does not depend on which thread holds what, because a maximum has no order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FP8_MAX: tl.constexpr = tl.constexpr(448.0)
INT8_MAX: tl.constexpr = tl.constexpr(127.0)  # symmetric: -128 is not used


_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-80)
_LARGEST_SCALE: tl.constexpr = tl.constexpr(2.0**80)
_SATURATED: tl.constexpr = tl.constexpr(2.0**20)  # far over 448


@triton.jit
def divide(values, scale):
    """values / scale rounded to nearest, for a scalar scale and quotients that become FP8.

    What a true division does, without its branches for each element: a reciprocal refined once,
    then two residual corrections, which are exact while nothing leaves float32's range. Scales
    near the ends of that range divide truly; a quotient that saturates anyway is not corrected
    (infinities would turn into NaN), and one too small for its residual is 0 in FP8.
    """
    if (scale > _SMALLEST_SCALE) & (scale < _LARGEST_SCALE):
        guess = 1.0 / scale
        inverse = tl.fma(guess, tl.fma(-scale, guess, 1.0), guess)
        rough = values * inverse
        quotient = tl.fma(tl.fma(-rough, scale, values), inverse, rough)
        quotient = tl.fma(tl.fma(-quotient, scale, values), inverse, quotient)
        quotient = tl.where(tl.abs(rough) > _SATURATED, rough, quotient)
    else:
        quotient = tl.math.div_rn(values, scale)
    return quotient


@triton.jit
def to_fp8(values, scale):
    """float32 values / scale (a scalar) as float8_e4m3fn."""
    return saturate(divide(values, scale))


@triton.jit
def saturate(values):
    """float32 as float8_e4m3fn: +-448 beyond its range, NaN stays NaN."""
    bounded = tl.clamp(values, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return bounded.to(tl.float8e4nv)


@triton.jit
def saturate_int8(values):
    """float32 rounded to nearest even as int8: +-127 beyond its range, NaN becomes 0."""
    known = tl.where(values == values, values, 0.0)
    bounded = tl.clamp(known, -INT8_MAX, INT8_MAX)
    # From 2^23 to 2^24 neighbours are 1 apart: the sum rounds, and ends in the whole number.
    bits = (bounded + 12582912.0).to(tl.int32, bitcast=True)
    return (bits - 0x4B400000).to(tl.int8)


@triton.jit
def row_scale(values):
    """max|values| / 448; 1 for zeros, NaN if there is one. Values outside the row must be 0."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as the numbers; NaN on top
    largest = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    return tl.where(largest == 0, 1.0, tl.math.div_rn(largest, FP8_MAX))


@triton.jit
def write_row(out, out_scale, row, offsets, mask, values, scale, PER_TOKEN: tl.constexpr):
    """Store float32 `values` (already rounded to the model dtype) as out's elements.

    out: pointer to the row's first element. FP8 is divided by `scale`, or by the row's own scale,
    which goes to out_scale[row].
    """
    if PER_TOKEN:
        own = row_scale(values)
        tl.store(out_scale + row, own)
        tl.store(out + offsets, to_fp8(values, own), mask=mask)
    elif out.dtype.element_ty == tl.float8e4nv:
        tl.store(out + offsets, to_fp8(values, scale), mask=mask)
    else:
        tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantize(
    x,
    scale,
    out,
    out_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block per row and per BLOCK columns (all columns with PER_TOKEN)."""
    if PDL:
        gdc_launch_dependents()
    divisor = 1.0
    if not PER_TOKEN:
        divisor = tl.load(scale)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    values = tl.load(x + row * WIDTH + offsets, mask=mask, other=0).to(tl.float32)
    write_row(out + row * WIDTH, out_scale, row, offsets, mask, values, divisor, PER_TOKEN)
