"""Matrix product as TensorRT layers.

FP8 operands are dequantized with a scale of one, multiplied into float32, and the product is
scaled: the builder recognizes an FP8 GEMM, and puts scales, bias and rounding into the kernel that
follows. So scales of any granularity are inputs, and no kernel touches an FP8 weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted

GEMM = "gemm"  # how the product's own layer is named, after its node


def add_layers(
    net: Layers,
    inputs: Mapping[str, ITensor],
    outputs: Mapping[str, Wanted],
    attributes: Mapping[str, Any],
) -> dict[str, ITensor]:
    """x [N, K] times weight [O, K] transposed, scaled, biased and rounded once.

    A product of 16-bit values is rounded to their type before a bias is added to it, and before it
    is widened to float32: TensorRT's products have the type of their operands.
    """
    x, weight = inputs["x"], inputs["weight"]
    if "weight_scale" in inputs:
        y = net.matmul(net.dequantize(x), net.dequantize(weight), GEMM)
        y = net.multiply(y, net.multiply(inputs["x_scale"], inputs["weight_scale"]))
    else:
        y = net.matmul(x, weight, GEMM)
    if "bias" in inputs:
        y = net.add(net.cast(y, "float32"), net.cast(inputs["bias"], "float32"))
    return {"out": net.cast(y, outputs["out"].dtype)}
