"""RMS normalization as TensorRT layers, rounded where the reference rounds.

TensorRT has no layer for it; the builder makes one kernel of these, with the residual addition
before and the quantization after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted
from llmctl.plugins.backends.tensorrt.layers import model_dtype as dtype_of


def normalize(net: Layers, x: ITensor, weight: ITensor, epsilon: float) -> ITensor:
    """x [..., H] / rms(x) * weight [1, ..., H], in x's type."""
    model_dtype, rank = dtype_of(net.trt, x), len(x.shape)
    wide = net.cast(x, "float32")
    mean = net.reduce(net.multiply(wide, wide), "AVG", rank - 1)
    biased = net.add(mean, net.constant(np.full((1,) * rank, epsilon, np.float32)))
    inverse = net.unary(net.unary(biased, "SQRT"), "RECIP")
    normalized = net.cast(net.multiply(wide, inverse), model_dtype)
    product = net.multiply(net.cast(normalized, "float32"), net.cast(weight, "float32"))
    return net.cast(product, model_dtype)


def add_layers(
    net: Layers,
    inputs: Mapping[str, ITensor],
    outputs: Mapping[str, Wanted],
    attributes: Mapping[str, Any],
) -> dict[str, ITensor]:
    """Normalize x (+ residual); `residual_out` is the sum."""
    x = inputs["x"]
    found = {}
    if "residual" in inputs:
        total = net.add(net.cast(x, "float32"), net.cast(inputs["residual"], "float32"))
        x = net.cast(total, dtype_of(net.trt, x))
    if "residual_out" in outputs:
        found["residual_out"] = x
    y = normalize(net, x, inputs["weight"], float(attributes["epsilon"]))
    return found | net.finish(y, inputs, outputs)
