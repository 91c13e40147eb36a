"""Embedding lookup as TensorRT layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted


def add_layers(
    net: Layers,
    inputs: Mapping[str, ITensor],
    outputs: Mapping[str, Wanted],
    attributes: Mapping[str, Any],
) -> dict[str, ITensor]:
    """out[n] = weight[token_ids[n]]."""
    return {"out": net.gather(inputs["weight"], net.step["token_ids"])}
