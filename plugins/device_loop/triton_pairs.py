"""The step of a head that reads the pairs a round committed (pairs_reference.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.device_loop.triton_kernel import _inside, _slot_of
from llmctl.plugins.device_loop.triton_tree import _parent


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


@triton.jit
def read_path(
    committed,
    num_pairs,
    capacity,
    targets,
    rows,
    parents,
    verified_cu_q,
    token_ids,
    position_ids,
    cu_q,
    kv_len,
    block_tables,
    slot_mapping,
    logit_rows,
    sources,
    batch,
    draft_len,
    count,  # the most tokens of a request
    max_draft_len,
    max_seq_len,
    tokens_per_block,
    max_blocks,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.arange(0, BLOCK_REQUESTS)
    in_batch = request < batch
    length = tl.load(committed + request, mask=in_batch, other=0)
    limit = tl.load(capacity + request, mask=in_batch, other=0)
    is_real = length > 0
    last = tl.load(rows + request, mask=is_real, other=0) - request * (draft_len + 1)
    last = tl.where(is_real, last, 0)
    tree = parents + request * max_draft_len
    depth = tl.zeros_like(last)
    up = last
    while tl.max(up, axis=0) > 0:
        depth += (up > 0).to(tl.int32)
        up = _parent(tree, up)
    depth = tl.minimum(depth, count - 1)  # whatever is stored
    size = tl.where(is_real, depth + 1, 0)
    end = tl.cumsum(size, 0)
    first, total = end - size, tl.sum(size, 0)
    root = length - 2 - depth
    tl.store(num_pairs + request, tl.maximum(length - 1, 0), mask=in_batch)
    tl.store(logit_rows + request, tl.where(is_real, end - 1, 0), mask=in_batch)
    entries = tl.minimum(length - 1, limit)
    tl.store(kv_len + request, tl.where(is_real, entries, 0), mask=in_batch)
    tl.store(cu_q + request + 1, end, mask=in_batch)
    tl.store(cu_q + request, tl.zeros_like(request), mask=request == 0)
    begin = tl.load(verified_cu_q + request, mask=is_real, other=0)
    table = block_tables + request * max_blocks
    node, at = last, tl.where(is_real, depth, -1)
    while tl.max(at, axis=0) >= 0:
        there = at >= 0
        to = first + at
        drawn = targets + request * (draft_len + 1) + node
        tl.store(token_ids + to, tl.load(drawn, mask=there, other=0), mask=there)
        tl.store(position_ids + to, _inside(root + at, there, max_seq_len), mask=there)
        slot = _slot_of(table, root + at, limit, there, tokens_per_block)
        tl.store(slot_mapping + to, slot, mask=there)
        tl.store(sources + to, begin + node, mask=there)
        node = _parent(tree, node)
        at -= 1
    for start in range(0, batch * count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_padding = (token >= total) & (token < batch * count)
        zero = tl.zeros_like(token)
        tl.store(token_ids + token, zero, mask=is_padding)
        tl.store(position_ids + token, zero, mask=is_padding)
        tl.store(slot_mapping + token, zero - 1, mask=is_padding)
        tl.store(sources + token, zero, mask=is_padding)
