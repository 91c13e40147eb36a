"""TensorRT's own attention, over a linear cache.

Only for plans with a continuous cache: the paged one is read by our kernel, between pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted, model_dtype


def add_layers(
    net: Layers,
    inputs: Mapping[str, ITensor],
    outputs: Mapping[str, Wanted],
    attributes: Mapping[str, Any],
) -> dict[str, ITensor]:
    """q [batch, heads, length, head size] over the caches -> out [batch * length, width].

    The scaled query is an output, too: so it gets a plain layout. Without that the builder expands
    every KV head to its query heads, over the whole capacity of the cache.
    """
    q, trt = inputs["q"], net.trt
    scaled = net.scale(net.cast(q, "float32"), float(attributes["softmax_scale"]))
    query = net.cast(scaled, model_dtype(trt, q))
    mask = _mask(net, int(attributes["window"]), int(inputs["k_cache"].shape[2]))
    kinds = trt.CausalMaskKind
    attention = net.network.add_attention_v2(
        query,
        inputs["k_cache"],
        inputs["v_cache"],
        trt.AttentionNormalizationOp.SOFTMAX,
        kinds.LOWER_RIGHT if mask is None else kinds.NONE,
    )
    attention.decomposable = False  # rather no engine than one that stores scores
    attention.name = f"{net.scope}.attention"
    if mask is None:
        attention.key_value_lengths = net.step["kv_length"]
    else:
        attention.mask = mask
    heads, size = int(attributes["num_heads"]), int(attributes["head_size"])
    merged = net.shuffle(attention.get_output(0), (-1, heads * size), before=(0, 2, 1, 3))
    return {"out": merged, "query": query}


def _mask(net: Layers, window: int, capacity: int) -> ITensor | None:
    """bool [batch, 1, length, capacity]; None where the lengths say everything."""
    if "attention_mask" in net.step:
        return net.step["attention_mask"]
    if window == 0:
        return None

    def make() -> ITensor:
        positions = net.shuffle(net.step["position_ids"], (0, 1, -1, 1))
        keys = net.constant(np.arange(capacity, dtype=np.int32).reshape(1, 1, 1, -1), np.int32)
        first = net.elementwise(
            positions, net.constant(np.full((1, 1, 1, 1), window, np.int32), np.int32), "SUB"
        )
        past = net.unary(net.elementwise(keys, positions, "GREATER"), "NOT")
        return net.elementwise(past, net.elementwise(keys, first, "GREATER"), "AND")

    return net.once(f"window {window}", make)
