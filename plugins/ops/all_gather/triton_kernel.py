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
def gathered(
    values, shares, row, columns, OWN: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr
):
    """`values`, or what a rank has of these columns of a row. shares: of MOST_RANKS ranks."""
    for rank in tl.static_range(RANKS):
        values = _take(values, shares[rank], row, columns, rank, OWN, WIDTH)
    return values


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
    shares = x0, x1, x2, x3, x4, x5, x6, x7
    none = tl.zeros((BLOCK,), out.dtype.element_ty)
    values = gathered(none, shares, row, columns, OWN, WIDTH, RANKS)
    tl.store(out + row * WIDTH + columns, values, mask=columns < WIDTH)
