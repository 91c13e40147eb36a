"""The ids of the keys that a product of many tokens leaves (prefill_best.cuh)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.sampling.triton_values import key_token


@triton.jit
def take_best(keys, out, rows, stride, offset, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Grid (blocks of ROWS rows): out[row * stride + offset] = the row's id; keys become zero."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    key = tl.load(keys + row, mask=is_row, other=0)
    tl.store(out + row * stride + offset, key_token(key), mask=is_row)
    tl.store(keys + row, tl.zeros_like(key), mask=is_row)
