"""Query/key norm, rotary embedding and the paged KV write: a thread block per token and some heads.

Every step rounds where reference.py rounds. Query, key and value heads of a token are treated
alike, in halves of a head (the two that rotate), and told apart by masks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.quantize.triton_kernel import saturate, saturate_int8
from llmctl.plugins.ops.rms_norm.triton_kernel import inverse_rms


@triton.jit
def _normalised(half, inverse, weight, dtype: tl.constexpr):
    return (weight * (half * inverse[:, None]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rounded(product, dtype: tl.constexpr, zero):
    """A product rounded to the model dtype, as float32. `zero` is a 0 that the compiler does not
    know: without it, product and sum would become one fused operation that rounds once."""
    bits = product.to(dtype).to(tl.int16, bitcast=True) | zero.to(tl.int16)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _store_kv(cache, offsets, values, scale, mask):
    """Quantized with `scale` where the cache is FP8 or INT8, converted otherwise."""
    if cache.dtype.element_ty == tl.float8e4nv:
        tl.store(cache + offsets, saturate(tl.math.div_rn(values, scale)), mask=mask)
    elif cache.dtype.element_ty == tl.int8:
        tl.store(cache + offsets, saturate_int8(tl.math.div_rn(values, scale)), mask=mask)
    else:
        tl.store(cache + offsets, values.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def rope_kv_write(
    qkv,
    rotary,
    q_norm,
    k_norm,
    k_scale,
    v_scale,
    position_ids,
    slot_mapping,
    q_out,
    cache,
    num_positions,
    num_blocks,
    layer,  # >= 0
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_SIZE // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    place = tl.arange(0, BLOCK_HALF)[None, :]
    exists = (head < ALL_HEADS) & (place < HALF)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS

    scale_of_k = 1.0
    scale_of_v = 1.0
    if HAS_K_SCALE:
        scale_of_k = tl.load(k_scale)
    if HAS_V_SCALE:
        scale_of_v = tl.load(v_scale)
    if PDL:  # in this order: attention reads what earlier steps cached before its own wait
        gdc_wait()
        gdc_launch_dependents()

    token = tl.program_id(0).to(tl.int64)
    first_of = qkv + (token * ALL_HEADS + head) * HEAD_SIZE + place
    first = tl.load(first_of, mask=exists, other=0).to(tl.float32)
    second = tl.load(first_of + HALF, mask=exists, other=0).to(tl.float32)
    position = tl.maximum(tl.minimum(tl.load(position_ids + token), num_positions - 1), 0)
    angles = rotary + position.to(tl.int64) * HEAD_SIZE + place
    cos = tl.load(angles, mask=place < HALF, other=0).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=place < HALF, other=0).to(dtype).to(tl.float32)

    x, y = first, second
    if HAS_Q_NORM or HAS_K_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        inverse = inverse_rms(squares, 1.0 * HEAD_SIZE, epsilon)
    if HAS_Q_NORM:
        low = tl.load(q_norm + place, mask=place < HALF, other=0).to(tl.float32)
        high = tl.load(q_norm + HALF + place, mask=place < HALF, other=0).to(tl.float32)
        x = tl.where(is_q, _normalised(first, inverse, low, dtype), x)
        y = tl.where(is_q, _normalised(second, inverse, high, dtype), y)
    if HAS_K_NORM:
        low = tl.load(k_norm + place, mask=place < HALF, other=0).to(tl.float32)
        high = tl.load(k_norm + HALF + place, mask=place < HALF, other=0).to(tl.float32)
        is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
        x = tl.where(is_k, _normalised(first, inverse, low, dtype), x)
        y = tl.where(is_k, _normalised(second, inverse, high, dtype), y)

    zero = layer >> 31
    x_cos, x_sin = _rounded(x * cos, dtype, zero), _rounded(x * sin, dtype, zero)
    y_cos, y_sin = _rounded(y * cos, dtype, zero), _rounded(y * sin, dtype, zero)
    x = tl.where(is_v, first, (x_cos - y_sin).to(dtype).to(tl.float32))
    y = tl.where(is_v, second, (y_cos + x_sin).to(dtype).to(tl.float32))

    to_q = q_out + (token * NUM_HEADS + head) * HEAD_SIZE + place
    tl.store(to_q, x.to(dtype), mask=exists & is_q)
    tl.store(to_q + HALF, y.to(dtype), mask=exists & is_q)

    slot = tl.load(slot_mapping + token)
    block = layer.to(tl.int64) * num_blocks + slot // TOKENS_PER_BLOCK
    kv_head = head - NUM_HEADS  # the keys' heads of a block, then the values'
    entry = (block * (2 * NUM_KV_HEADS) + kv_head) * TOKENS_PER_BLOCK + slot % TOKENS_PER_BLOCK
    offsets = entry * HEAD_SIZE + place
    writes = exists & (head >= NUM_HEADS) & (slot >= 0)
    scale = tl.where(is_v, scale_of_v, scale_of_k)
    _store_kv(cache, offsets, x, scale, writes)
    _store_kv(cache, offsets + HALF, y, scale, writes)
