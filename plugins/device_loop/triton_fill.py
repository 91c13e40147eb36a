"""Static trees filled with the likeliest tokens of an engine's heads (tree_reference.fill_tree)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.sampling.triton_values import key_token, order_of

_SMALLEST: tl.constexpr = tl.constexpr(-0x80000000)
_ABOVE: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def list_top(
    addresses,
    keys,
    stride,  # of keys from head to head
    count,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, requests, heads). addresses: of each head's logits. keys [rows, chunks, count]
    of each head: those of a chunk's `count` largest logits, the largest first, as positive int64;
    0 behind the last."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    logits = tl.load(addresses + head).to(tl.pointer_type(tl.float32))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=0.0)
    order = tl.where(values != values, _SMALLEST, order_of(values)).to(tl.int64)
    own = ((order + 2147483648) << 31) | (0x7FFFFFFF - ids).to(tl.int64)
    own = tl.where(ids < VOCAB, own, 0)
    to = keys + head.to(tl.int64) * stride + (row * tl.num_programs(0) + chunk) * count
    largest = tl.max(own, axis=0)
    for nth in range(0, count):
        tl.store(to + nth, largest)
        largest = tl.max(tl.where(own < largest, own, 0), axis=0)


@triton.jit
def fill_tree(
    keys,
    heads,
    ranks,
    drafts,
    stride,  # of keys from head to head
    draft_len,
    count,
    MAX_DRAFT_LEN: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (requests, heads). keys: `list_top` of each head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request, head = tl.program_id(0), tl.program_id(1)
    entry = tl.arange(0, BLOCK_KEYS)
    first = keys + head.to(tl.int64) * stride + request * NUM_CHUNKS * count
    own = tl.load(first + entry, mask=entry < NUM_CHUNKS * count, other=0)
    rank = tl.arange(0, BLOCK_RANKS)
    ids = tl.zeros([BLOCK_RANKS], tl.int32)
    largest = tl.max(own, axis=0)
    for nth in range(0, count):
        token = tl.where(largest > 0, key_token(largest), 0)
        ids = tl.where(rank == nth, token, ids)
        largest = tl.max(tl.where(own < largest, own, 0), axis=0)
    for start in range(0, draft_len, BLOCK_NODES):
        node = start + tl.arange(0, BLOCK_NODES)
        exists = node < draft_len
        is_own = exists & (tl.load(heads + node, mask=exists, other=-1) == head)
        wanted = tl.load(ranks + node, mask=is_own, other=0)
        chosen = tl.where(rank[None, :] == wanted[:, None], ids[None, :], 0)
        tl.store(drafts + request * MAX_DRAFT_LEN + node, tl.sum(chosen, axis=1), mask=is_own)
