"""Embedding and RMS normalization: one thread block per token, with the bits of the two kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.gather_rows.triton_kernel import source_row
from llmctl.plugins.ops.quantize.triton_kernel import write_row
from llmctl.plugins.ops.rms_norm.triton_kernel import normalize_row


@triton.jit
def embedding_norm(
    table,
    token_ids,
    weight,
    scale,
    embedded,
    out,
    out_scale,
    num_ids,
    epsilon,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
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
    taken = source_row(token_ids, row, num_ids)
    values = tl.load(table + taken * HIDDEN + offsets, mask=mask, other=0)
    tl.store(embedded + row * HIDDEN + offsets, values, mask=mask)
    product = normalize_row(values, factors, epsilon, HIDDEN, table.dtype.element_ty)
    write_row(out + row * HIDDEN, out_scale, row, offsets, mask, product, divisor, PER_TOKEN)
