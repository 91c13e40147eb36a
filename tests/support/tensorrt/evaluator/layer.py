"""A layer of a known kind, and what the walk asks of it again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from support.tensorrt.evaluator.errors import UnknownLayer
from support.tensorrt.evaluator.types import BF16, FP8, dtype_of


class Layer:
    """A narrowed layer and what the walk asks of it again and again."""

    def __init__(self, layer: Any, kind: str, constants: Mapping[str, np.ndarray], trt: Any):
        self.layer, self.kind, self.trt = layer, kind, trt
        self.name = layer.name
        tensors = [layer.get_input(index) for index in range(layer.num_inputs)]
        self.inputs = [None if tensor is None else tensor.name for tensor in tensors]
        outputs = [layer.get_output(index) for index in range(layer.num_outputs)]
        self.outputs = [tensor.name for tensor in outputs]
        self.output_shapes = [tuple(tensor.shape) for tensor in outputs]
        self.output_dtypes = [dtype_of(tensor.dtype) for tensor in outputs]
        self.constant = _constant(self, constants) if kind == "CONSTANT" else None

    def refuse(self, what: str) -> UnknownLayer:
        """The error for a use of this layer without a rule."""
        return UnknownLayer(f"{self.name} ({self.kind}): {what}")


def _constant(layer: Layer, kept: Mapping[str, np.ndarray]) -> np.ndarray:
    shape, dtype = tuple(layer.layer.shape), layer.output_dtypes[0]
    array = kept.get(layer.outputs[0])
    if array is None:
        if dtype in (FP8, BF16):
            raise layer.refuse(f"{dtype} constants cannot be read back; give them as `constants`")
        array = np.array(layer.layer.weights)  # a copy: the network owns the memory
    assert array.dtype == dtype and array.size == int(np.prod(shape)), (array.dtype, array.shape)
    return array.reshape(shape)
