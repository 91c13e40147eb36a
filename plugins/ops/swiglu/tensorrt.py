"""SwiGLU as TensorRT layers, rounded where the reference rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted
from llmctl.plugins.backends.tensorrt.layers import model_dtype as dtype_of


def add_layers(
    net: Layers,
    inputs: Mapping[str, ITensor],
    outputs: Mapping[str, Wanted],
    attributes: Mapping[str, Any],
) -> dict[str, ITensor]:
    """silu(gate) * up of x [N, 2I], perhaps quantized."""
    x = inputs["x"]
    model_dtype, width = dtype_of(net.trt, x), x.shape[1] // 2
    gate = net.cast(net.columns(x, 0, width), "float32")
    up = net.cast(net.columns(x, width, 2 * width), "float32")
    silu = net.cast(net.multiply(gate, net.sigmoid(gate)), model_dtype)
    product = net.multiply(net.cast(silu, "float32"), up)
    return net.finish(net.cast(product, model_dtype), inputs, outputs)
