"""The sum of the partial sums of all ranks, then what ends a product: scale, bias, one rounding.

Ranks are added as a balanced tree, (0 + 1) + (2 + 3), whatever else is in the step, with the
expressions of reference.py, so that every rank has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _own(x, place, mask, WIDTH: tl.constexpr, LEAVES: tl.constexpr):
    """A rank's sum: its parts, which lie side by side, added as a balanced tree."""
    total = tl.load(x + place, mask=mask, other=0)
    if LEAVES >= 2:
        total = total + tl.load(x + place + WIDTH, mask=mask, other=0)
    if LEAVES >= 4:
        second = tl.load(x + place + 2 * WIDTH, mask=mask, other=0)
        total = total + (second + tl.load(x + place + 3 * WIDTH, mask=mask, other=0))
    if LEAVES == 8:
        third = tl.load(x + place + 4 * WIDTH, mask=mask, other=0)
        third = third + tl.load(x + place + 5 * WIDTH, mask=mask, other=0)
        fourth = tl.load(x + place + 6 * WIDTH, mask=mask, other=0)
        total = total + (third + (fourth + tl.load(x + place + 7 * WIDTH, mask=mask, other=0)))
    return total


@triton.jit
def all_reduce(
    x0,  # of each rank; those behind RANKS are not read
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    weight_scale,
    x_scale,
    bias,
    out,
    zero,  # a 0 that the compiler does not know
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    LEAVES: tl.constexpr,
    HAS_WEIGHT_SCALE: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block per row and per BLOCK columns."""
    if PDL:
        gdc_launch_dependents()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    # Constants are read while the kernel before this one still runs.
    if HAS_WEIGHT_SCALE:
        scale = tl.load(weight_scale + columns, mask=mask, other=0)
        if HAS_X_SCALE:
            scale = tl.load(x_scale) * scale
    elif HAS_X_SCALE:
        scale = tl.load(x_scale)
    if HAS_BIAS:
        added = tl.load(bias + columns, mask=mask, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = row * (WIDTH * LEAVES) + columns
    total = _own(x0, place, mask, WIDTH, LEAVES)
    if RANKS >= 2:
        total = total + _own(x1, place, mask, WIDTH, LEAVES)
    if RANKS >= 4:
        second = _own(x2, place, mask, WIDTH, LEAVES)
        total = total + (second + _own(x3, place, mask, WIDTH, LEAVES))
    if RANKS == 8:
        third = _own(x4, place, mask, WIDTH, LEAVES)
        third = third + _own(x5, place, mask, WIDTH, LEAVES)
        fourth = _own(x6, place, mask, WIDTH, LEAVES)
        total = total + (third + (fourth + _own(x7, place, mask, WIDTH, LEAVES)))
    if HAS_WEIGHT_SCALE or HAS_X_SCALE:
        total = total * scale
    if HAS_BIAS:
        # Else product and sum would become one fused operation, which rounds once.
        product = (total.to(tl.int32, bitcast=True) | zero).to(tl.float32, bitcast=True)
        total = product + added
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=mask)
