"""Copies of rows chosen by an index array on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gather(
    source,
    rows,
    out,
    num_source_rows,
    beside,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i * beside] = source[rows[i]]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    row = source_row(rows, index, num_source_rows)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    values = tl.load(source + row * WIDTH + offsets, mask=mask)
    tl.store(out + index * beside * WIDTH + offsets, values, mask=mask)


@triton.jit
def source_row(rows, index, num_source_rows):
    """rows[index]; outside the source the nearest row in it, for padding and tokens that a failed
    engine drew (-1) must not read foreign memory."""
    row = tl.load(rows + index)
    return tl.maximum(tl.minimum(row, num_source_rows - 1), 0).to(tl.int64)
