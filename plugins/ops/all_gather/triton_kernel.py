"""Columns of all ranks side by side."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _take(values, x, row, columns, RANK: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr):
    """`values`, or a rank's where the columns are its own."""
    place = columns - RANK * OWN
    mask = (place >= 0) & (place < OWN) & (columns < WIDTH)
    return tl.where(mask, tl.load(x + row * OWN + place, mask=mask, other=0), values)


@triton.jit
def all_gather(
    x0,  # of each rank; those behind RANKS are not read
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    out,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block per row and per BLOCK columns; the last ranks' may be padding."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _take(tl.zeros((BLOCK,), tl.float32), x0, row, columns, 0, OWN, WIDTH)
    if RANKS >= 2:
        values = _take(values, x1, row, columns, 1, OWN, WIDTH)
    if RANKS >= 4:
        values = _take(values, x2, row, columns, 2, OWN, WIDTH)
        values = _take(values, x3, row, columns, 3, OWN, WIDTH)
    if RANKS == 8:
        values = _take(values, x4, row, columns, 4, OWN, WIDTH)
        values = _take(values, x5, row, columns, 5, OWN, WIDTH)
        values = _take(values, x6, row, columns, 6, OWN, WIDTH)
        values = _take(values, x7, row, columns, 7, OWN, WIDTH)
    tl.store(out + row * WIDTH + columns, values, mask=columns < WIDTH)
