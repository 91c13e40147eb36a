"""The sum over ranks as TensorRT layers: a collective within the plan."""

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
    """x [N, K] summed over all ranks, and the bias [1, K] added, rounded like the product."""
    trt = net.trt
    layer = net.network.add_dist_collective(
        inputs["x"], trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, []
    )
    layer.num_ranks = net.num_ranks
    y = net.name(layer, "sum")
    if "bias" in inputs:
        y = net.add(net.cast(y, "float32"), net.cast(inputs["bias"], "float32"))
    return {"out": net.cast(y, outputs["out"].dtype)}
