"""Rotary embedding and the update of a linear cache as TensorRT layers.

Only for plans with a continuous cache: the paged one is written by our kernel, between pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted, model_dtype
from llmctl.plugins.ops.rms_norm.tensorrt import normalize


def add_layers(
    net: Layers,
    inputs: Mapping[str, ITensor],
    outputs: Mapping[str, Wanted],
    attributes: Mapping[str, Any],
) -> dict[str, ITensor]:
    """Split qkv [batch * length, width], rotate q and k, store k and v from `write_index` on.

    q leaves as [batch, heads, length, head size]; the caches are updated in place.
    """
    qkv, size = inputs["qkv"], int(attributes["head_size"])
    heads, kv_heads = int(attributes["num_heads"]), int(attributes["num_kv_heads"])
    epsilon = float(attributes["epsilon"])
    parts = {}
    start = 0
    for role, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        part = net.columns(qkv, start * size, (start + count) * size)
        part = net.shuffle(part, dims_from=_padded(net, count, size))
        if f"{role}_norm" in inputs:
            weight = net.shuffle(inputs[f"{role}_norm"], (1, 1, 1, size))
            part = normalize(net, part, weight, epsilon)
        parts[role] = net.shuffle(part, before=(0, 2, 1, 3))
        start += count
    cosines, sines = net.once(
        "rotary", lambda: _factors(net, inputs["rotary"], size, model_dtype(net.trt, qkv))
    )
    for role in ("q", "k"):
        layer = net.network.add_rotary_embedding(parts[role], cosines, sines, False, 0)
        parts[role] = net.name(layer, f"rotate_{role}")
    found = {"q": parts["q"]}
    for role in ("k", "v"):
        layer = net.network.add_kv_cache_update(
            inputs[f"{role}_cache"],
            parts[role],
            net.step["write_index"],
            net.trt.KVCacheMode.LINEAR,
        )
        found[f"{role}_cache"] = net.name(layer, f"write_{role}")
    return found


def _padded(net: Layers, heads: int, size: int) -> ITensor:
    """The dimensions [batch, length, heads, head size]."""
    return net.concatenate(
        [net.shape(net.step["position_ids"]), net.constant([heads, size], np.int64)]
    )


def _factors(net: Layers, rotary: ITensor, size: int, dtype: str) -> tuple[ITensor, ITensor]:
    """Cosines and sines [batch, length, head size / 2] of a step's positions, for all layers."""
    factors = net.gather(rotary, net.step["position_ids"])
    half = size // 2
    cosines, sines = net.columns(factors, 0, half), net.columns(factors, half, size)
    return net.cast(cosines, dtype), net.cast(sines, dtype)
