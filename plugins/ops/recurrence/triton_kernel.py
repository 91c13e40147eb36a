"""The recurrence element by element, each row behind the one that it continues."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.gather_rows.triton_kernel import source_row
from llmctl.plugins.ops.swiglu.triton_kernel import silu


@triton.jit
def recurrence(
    x,
    context,
    carry,
    rows,
    out,
    state,
    num_context_rows,
    WIDTH: tl.constexpr,
    CONTEXT_WIDTH: tl.constexpr,  # 0: the state alone
    BLOCK: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block per row and per BLOCK columns; spec.py says what it computes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    before = source_row(rows, index, num_context_rows)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + index * WIDTH + offsets, mask=mask, other=0)
    if HAS_CARRY:
        carried = tl.load(carry + before * WIDTH + offsets, mask=mask, other=0)
        values = (values.to(tl.float32) + carried.to(tl.float32)).to(dtype)
    if SILU:
        values = silu(values.to(tl.float32)).to(dtype)
    tl.store(state + index * WIDTH + offsets, values, mask=mask)
    if CONTEXT_WIDTH:
        kept = tl.load(context + before * CONTEXT_WIDTH + offsets, mask=mask, other=0)
        first = out + index * 2 * WIDTH
        tl.store(first + WIDTH + offsets, values, mask=mask)
        tl.store(first + offsets, kept, mask=mask)
