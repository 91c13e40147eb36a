"""SiLU and the residual behind it: element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.swiglu.triton_kernel import silu


@triton.jit
def silu_residual(
    x,
    residual,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = silu(x) + residual; one thread block per row and per BLOCK columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    first = tl.program_id(0).to(tl.int64) * WIDTH
    dtype: tl.constexpr = x.dtype.element_ty
    values = silu(tl.load(x + first + offsets, mask=mask, other=0).to(tl.float32)).to(dtype)
    if HAS_RESIDUAL:
        added = tl.load(residual + first + offsets, mask=mask, other=0).to(tl.float32)
        values = (values.to(tl.float32) + added).to(dtype)
    tl.store(out + first + offsets, values, mask=mask)
