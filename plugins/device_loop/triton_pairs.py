"""The step of a head that reads the pairs a round committed (pairs_reference.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def read_pairs(
    committed,
    num_pairs,
    targets,
    verified_positions,
    verified_cu_q,
    verified_kv_len,
    verified_slots,
    token_ids,
    position_ids,
    cu_q,
    kv_len,
    slot_mapping,
    logit_rows,
    batch,
    count,  # tokens of a request in the verification
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.arange(0, BLOCK_REQUESTS)
    in_batch = request < batch
    length = tl.load(committed + request, mask=in_batch, other=0)
    is_real = length > 0
    end = tl.cumsum(is_real.to(tl.int32), 0)
    # As the verification was packed: real requests first, and all with as many tokens.
    place = tl.where(is_real, end - 1, tl.sum(is_real.to(tl.int32), 0) + request - end)
    root = tl.load(verified_positions + place * count, mask=in_batch & is_real, other=0)
    accepted = tl.where(is_real, length - 2 - root, 0)
    tl.store(num_pairs + request, tl.maximum(length - 1, 0), mask=in_batch)
    tl.store(logit_rows + request, place * count + accepted, mask=in_batch)
    tl.store(kv_len + request, tl.load(verified_kv_len + request, mask=in_batch), mask=in_batch)
    ends = tl.load(verified_cu_q + request + 1, mask=in_batch)
    tl.store(cu_q + request + 1, ends, mask=in_batch)
    tl.store(cu_q + request, tl.zeros_like(request), mask=request == 0)
    for start in range(0, count, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)[None, :]
        exists = in_batch[:, None] & (token < count)
        index = place[:, None] * count + token
        drawn = exists & is_real[:, None]
        value = tl.load(targets + request[:, None] * count + token, mask=drawn, other=0)
        tl.store(token_ids + index, value, mask=exists)
        position = tl.load(verified_positions + index, mask=exists)
        tl.store(position_ids + index, position, mask=exists)
        slot = tl.load(verified_slots + index, mask=exists)
        tl.store(slot_mapping + index, slot, mask=exists)
