"""The bookkeeping kernels of rounds: one thread block, a few vectors of integers; and the argmax of
a draft's logits, whose last thread block describes the step that follows.

Record columns are those of state.py. reference.py says the same plainly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.device_loop import state
from llmctl.plugins.ops.sampling.triton_kernel import best_of_row

_ACCEPTED: tl.constexpr = tl.constexpr(state.RECORD_ACCEPTED)
_EMITTED: tl.constexpr = tl.constexpr(state.RECORD_EMITTED)
_DRAFTS: tl.constexpr = tl.constexpr(state.RECORD_DRAFTS)
_TOKENS: tl.constexpr = tl.constexpr(state.RECORD_TOKENS)


@triton.jit
def feed(
    root,
    previous,
    num_read,
    committed,
    capacity,
    drafts,
    token_ids,
    position_ids,
    cu_q,
    kv_len,
    block_tables,
    slot_mapping,
    logit_rows,
    batch,
    first,  # place of the first token after the root: -1 previous, 0 root, 1 the first draft
    count,  # tokens of a request
    rows,  # of them, from the last: how many get logits
    may_skip,  # whether the first token, if it was read, is padding behind the root
    max_seq_len,
    tokens_per_block,
    max_blocks,
    MAX_DRAFT_LEN: tl.constexpr,
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
    is_real = (length > 0).to(tl.int32)
    limit = tl.load(capacity + request, mask=in_batch, other=0)
    end = tl.cumsum(is_real, 0)
    num_real = tl.sum(is_real, 0)
    # Tokens of real requests come first, tokens of padding fill the rest of the step.
    place = tl.where(is_real > 0, end - 1, num_real + request - end)
    # What is verified is the root and drafts, of which the draft engine has read all but the last.
    tl.store(num_read + request, length + count - 2, mask=(is_real > 0) & (first == 0))
    has_read = tl.load(num_read) >= tl.load(committed) - 1
    skipped = ((may_skip != 0) & has_read).to(tl.int32)
    first += skipped

    tl.store(cu_q + request + 1, end * (count - skipped), mask=in_batch)
    tl.store(cu_q + request, tl.zeros_like(request), mask=request == 0)
    entries = tl.minimum(length + first + count - skipped - 1, limit)
    tl.store(kv_len + request, tl.where(is_real > 0, entries, 0), mask=in_batch)

    request = request[:, None]
    length = length[:, None]
    limit = limit[:, None]
    is_real = is_real[:, None] > 0
    place = place[:, None]
    for start in range(0, count, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)[None, :]
        exists = (request < batch) & (token < count)
        real = exists & is_real & (token < count - skipped)
        after_root = first + token
        is_draft = after_root > 0
        value = tl.load(
            drafts + request * MAX_DRAFT_LEN + after_root - 1, mask=real & is_draft, other=0
        )
        value += tl.load(root + request + token * 0, mask=real & (after_root == 0), other=0)
        value += tl.load(previous + request + token * 0, mask=real & (after_root < 0), other=0)
        position = length - 1 + after_root
        slot = _slot_of(
            block_tables + request * max_blocks, position, limit, real, tokens_per_block
        )
        index = place * count + token
        tl.store(token_ids + index, value, mask=exists)
        tl.store(position_ids + index, _inside(position, real, max_seq_len), mask=exists)
        tl.store(slot_mapping + index, slot, mask=exists)
        row = request * rows + token - (count - skipped - rows)
        has_row = exists & (token < count - skipped) & (token >= count - skipped - rows)
        tl.store(logit_rows + row, index, mask=has_row)


@triton.jit
def draw_next(
    logits,
    keys,
    committed,
    capacity,
    drafts,
    token_ids,
    position_ids,
    cu_q,
    kv_len,
    block_tables,
    slot_mapping,
    logit_rows,
    batch,
    index,  # of the draft that is drawn
    max_draft_len,
    max_seq_len,
    tokens_per_block,
    max_blocks,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, requests). The thread block that knows a row's token stores it, and what the
    next step needs to know of this request, which it found out before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    request = tl.arange(0, BLOCK_REQUESTS)
    length = tl.load(committed + row)
    limit = tl.load(capacity + row)
    is_real = length > 0
    others = (tl.load(committed + request, mask=request < batch, other=0) > 0).to(tl.int32)
    position = length + index
    slot = _slot_of(block_tables + row * max_blocks, position, limit, is_real, tokens_per_block)
    before = tl.sum(tl.where(request < row, others, 0), 0)
    place = tl.where(is_real, before, tl.sum(others, 0) + row - before)

    knows, token = best_of_row(logits, keys, VOCAB, CHUNK, BLOCK_CHUNKS)
    if knows:
        tl.store(token_ids + place, tl.where(is_real, token, 0))
        tl.store(position_ids + place, _inside(position, is_real, max_seq_len))
        tl.store(slot_mapping + place, slot)
        tl.store(kv_len + row, tl.where(is_real, tl.minimum(position + 1, limit), 0))
        tl.store(cu_q + row + 1, before + is_real.to(tl.int32))
        tl.store(cu_q, 0)
        tl.store(logit_rows + row, place)
        tl.store(drafts + row * max_draft_len + index, token)


@triton.jit
def _slot_of(table, position, limit, is_real, tokens_per_block):
    """Where the cache has the position; -1 where it has none. table: a request's blocks."""
    has_slot = is_real & (position >= 0) & (position < limit)
    block = tl.load(table + position // tokens_per_block, mask=has_slot, other=0)
    return tl.where(has_slot, block * tokens_per_block + position % tokens_per_block, -1)


@triton.jit
def _inside(position, is_real, max_seq_len):
    """The position, within what an engine knows; 0 for padding."""
    return tl.where(is_real, tl.maximum(tl.minimum(position, max_seq_len - 1), 0), 0)


@triton.jit
def accept(
    root,
    previous,
    committed,
    max_len,
    drafts,
    targets,
    counter,
    ring,
    batch,
    draft_len,
    slots,
    MAX_BATCH_SIZE: tl.constexpr,
    MAX_DRAFT_LEN: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_RECORD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WIDTH: tl.constexpr = _TOKENS + MAX_DRAFT_LEN + 1
    finished = tl.load(counter)
    record = ring + (finished % slots).to(tl.int64) * (MAX_BATCH_SIZE * WIDTH)
    column = tl.arange(0, BLOCK_RECORD)[None, :]
    index = column - _TOKENS  # of a token in the record
    for start in range(0, MAX_BATCH_SIZE, BLOCK_REQUESTS):
        request = start + tl.arange(0, BLOCK_REQUESTS)
        length = tl.load(committed + request, mask=request < batch, other=0)
        is_real = length > 0
        last = tl.load(root + request, mask=is_real, other=0)
        most = tl.load(max_len + request, mask=is_real, other=0)
        limit = tl.minimum(draft_len, most - length - 1)

        first_target = targets + request[:, None] * (draft_len + 1)
        drawn = is_real[:, None] & (index >= 0) & (index <= draft_len)
        target = tl.load(first_target + index, mask=drawn, other=0)
        judged = is_real[:, None] & (index >= 0) & (index < limit[:, None])
        draft = tl.load(drafts + request[:, None] * MAX_DRAFT_LEN + index, mask=judged, other=0)
        stands = (judged & (draft == target)) | (index < 0)
        accepted = tl.min(tl.where(stands, BLOCK_RECORD, index), axis=1)

        emitted = tl.where(index == accepted[:, None], target, 0)
        before = tl.where(index == accepted[:, None] - 1, target, 0)
        behind = tl.where(accepted > 0, tl.sum(before, axis=1), last)
        tl.debug_barrier()  # several threads may read a number that one of them replaces
        tl.store(root + request, tl.sum(emitted, axis=1), mask=is_real)
        tl.store(previous + request, behind, mask=is_real)
        tl.store(committed + request, length + accepted + 1, mask=is_real)

        value = tl.where(index <= accepted[:, None], target, 0)
        value = tl.where(column == _EMITTED, accepted[:, None] + 1, value)
        value = tl.where(column == _DRAFTS, tl.maximum(limit, 0)[:, None], value)
        value = tl.where(column == _ACCEPTED, accepted[:, None], value)
        value = tl.where(column == 0, length[:, None], value)
        exists = (request[:, None] < MAX_BATCH_SIZE) & (column < WIDTH)
        tl.store(
            record + request[:, None] * WIDTH + column,
            tl.where(is_real[:, None], value, 0),
            mask=exists,
        )
    # Begins anew behind 2^31 - 1, where it would turn negative; `slots` divides 2^31.
    tl.store(counter, (finished + 1) & 0x7FFFFFFF)
