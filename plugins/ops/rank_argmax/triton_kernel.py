"""The best id of each row of logits that ranks on one device have shares of."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.all_gather.triton_kernel import gathered
from llmctl.plugins.ops.sampling.triton_kernel import best_of_chunks
from llmctl.plugins.ops.sampling.triton_values import best_key


@triton.jit
def rank_argmax(
    x0,  # of each rank; those behind RANKS are not read
    x1,
    x2,
    x3,
    x4,
    x5,
    x6,
    x7,
    out,
    keys,
    stride,
    offset,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows): out[row * stride + offset] = the row's best id."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    lowest = tl.full((CHUNK,), float("-inf"), tl.float32)
    shares = x0, x1, x2, x3, x4, x5, x6, x7
    values = gathered(lowest, shares, row.to(tl.int64), ids, OWN, VOCAB, RANKS)
    knows, token = best_of_chunks(best_key(values, ids), keys, VOCAB, CHUNK, BLOCK_CHUNKS)
    if knows:
        tl.store(out + row * stride + offset, token)
