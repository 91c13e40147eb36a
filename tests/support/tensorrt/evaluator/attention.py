"""IAttention: its input layer only gathers tensors, its output layer computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.tensorrt.evaluator.layer import Layer
from support.tensorrt.evaluator.types import dtype_of, saturated, wide


def attend(layer: Layer, known: dict[str, np.ndarray]) -> np.ndarray:
    """q [B, heads, S, D], k and v [B, kv heads, capacity, D] -> [B, heads, S, D] float32.

    The layer applies no scale. A lower right mask is anchored at each sequence's valid prefix
    (`key_value_lengths`, the capacity without them): row i of S sees key j <= i + length - S.
    """
    attention = layer.layer.attention
    _require_padded(layer, attention)
    q, k, v = (wide(known[attention.get_input(index).name]) for index in range(3))
    groups = q.shape[1] // k.shape[1]
    if groups * k.shape[1] != q.shape[1]:
        raise layer.refuse(f"{q.shape[1]} heads over {k.shape[1]}")
    k, v = (np.repeat(side, groups, 1) for side in (k, v))
    scores = q @ k.swapaxes(2, 3)
    mask = _value(attention.mask, known)
    if mask is not None and mask.dtype != bool:
        scores = scores + wide(mask)
    visible = _visible(layer, attention, scores.shape, _value(attention.key_value_lengths, known))
    if mask is not None and mask.dtype == bool:
        visible = visible & mask
    with np.errstate(invalid="ignore"):  # a row that sees nothing becomes NaN, so its use shows
        scores = np.where(visible, scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        weights = powers / powers.sum(-1, keepdims=True)
    scale = _value(attention.normalization_quantize_scale, known)
    if scale is not None:
        step = wide(scale).reshape(())
        kind = dtype_of(attention.normalization_quantize_to_type)
        weights = saturated(weights / step, kind).astype(np.float32) * step
    result: np.ndarray = weights @ v
    return result


def _require_padded(layer: Layer, attention: Any) -> None:
    if attention.norm_op.name != "SOFTMAX":
        raise layer.refuse(f"normalization {attention.norm_op.name}")
    for form in (attention.query_form, attention.key_value_form):
        if form.name != "PADDED_BHND":
            raise layer.refuse(f"{form.name} tensors")


def _visible(
    layer: Layer, attention: Any, shape: tuple[int, ...], lengths: np.ndarray | None
) -> np.ndarray:
    batch, _, count, capacity = shape
    found = np.full(batch, capacity) if lengths is None else lengths.astype(np.int64)
    assert (found >= 0).all() and (found <= capacity).all(), f"{layer.name}: lengths {found}"
    last = found[:, None, None, None]
    rows, keys = np.arange(count)[:, None], np.arange(capacity)
    visible = keys < last
    kind = attention.causal_kind.name
    if kind == "LOWER_RIGHT":
        visible = visible & (keys <= rows + last - count)
    elif kind == "UPPER_LEFT":
        visible = visible & (keys <= rows)
    elif kind != "NONE":
        raise layer.refuse(f"causal kind {kind}")
    return np.broadcast_to(visible, shape)


def _value(tensor: Any, known: dict[str, np.ndarray]) -> np.ndarray | None:
    return None if tensor is None else known[tensor.name]
