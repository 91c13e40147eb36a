"""Rows of two activations side by side."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def concat(
    x,
    y,
    out,
    WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block per row and per BLOCK columns: out[n] = x[n], y[n]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_first = columns < WIDTH
    is_second = (columns >= WIDTH) & (columns < WIDTH + OTHER_WIDTH)
    first = tl.load(x + row * WIDTH + columns, mask=is_first)
    second = tl.load(y + row * OTHER_WIDTH + columns - WIDTH, mask=is_second)
    values = tl.where(is_first, first, second)
    tl.store(out + row * (WIDTH + OTHER_WIDTH) + columns, values, mask=is_first | is_second)
