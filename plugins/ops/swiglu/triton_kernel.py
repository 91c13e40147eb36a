"""SwiGLU: element by element, so rows may be cut anywhere unless they have a scale of their own."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.quantize.triton_kernel import write_row


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate)) in float32."""
    return tl.math.div_rn(gate, 1.0 + tl.exp(-gate))


@triton.jit
def swiglu(
    x,
    scale,
    out,
    out_scale,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC_SCALE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    divisor = 1.0
    if STATIC_SCALE:
        divisor = tl.load(scale)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < INNER
    first = x + row * (2 * INNER)
    gate = tl.load(first + offsets, mask=mask, other=0).to(tl.float32)
    up = tl.load(first + INNER + offsets, mask=mask, other=0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    product = (silu(gate).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    write_row(out + row * INNER, out_scale, row, offsets, mask, product, divisor, PER_TOKEN)
