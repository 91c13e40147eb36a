"""Logits of a reduced vocabulary, by token of the whole one."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def expand_logits(
    x,
    index,
    out,
    WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One thread block per row and per BLOCK tokens; spec.py says what it computes."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(index + tokens, mask=tokens < VOCAB, other=-1)  # a weight: no step writes it
    is_column = (columns >= 0) & (columns < WIDTH)
    if PDL:
        gdc_wait()
    values = tl.load(x + row * WIDTH + columns, mask=is_column, other=-float("inf"))
    tl.store(out + row * VOCAB + tokens, values, mask=tokens < VOCAB)
