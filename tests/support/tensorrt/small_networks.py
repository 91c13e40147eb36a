"""Small TensorRT networks for the evaluator's own tests."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from llmctl.plugins.backends.tensorrt.packages import shared_logger
from support.tensorrt.evaluator import evaluate

trt = pytest.importorskip("tensorrt_rtx", reason="the network objects are TensorRT's")

FP8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
TYPES = {
    np.dtype(np.float32): trt.float32,
    np.dtype(np.float16): trt.float16,
    np.dtype(np.int32): trt.int32,
    np.dtype(np.int64): trt.int64,
    np.dtype(bool): trt.bool,
    FP8: trt.fp8,
    BF16: trt.bfloat16,
}
LOGGER = shared_logger(trt)  # a process keeps the first it is given


class Net:
    """A network under construction, and the arrays it points at."""

    def __init__(self) -> None:
        self.builder = trt.Builder(LOGGER)
        self.n = self.builder.create_network(0)
        self.feeds: dict[str, np.ndarray] = {}
        self.kept: dict[str, np.ndarray] = {}

    def feed(self, name: str, array: np.ndarray, shape: tuple[int, ...] | None = None) -> Any:
        """An input, all of its dimensions dynamic unless a shape is given."""
        self.feeds[name] = np.ascontiguousarray(array)
        dims = (-1,) * array.ndim if shape is None else shape
        return self.n.add_input(name, TYPES[array.dtype], dims)

    def constant(self, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array).reshape(array.shape)
        weights = trt.Weights(TYPES[array.dtype], array.ctypes.data, array.size)
        out = self.n.add_constant(array.shape, weights).get_output(0)
        self.kept[out.name] = array
        return out

    def run(self, *outputs: Any) -> list[np.ndarray]:
        for index, tensor in enumerate(outputs):
            tensor.name = f"out{index}"
            self.n.mark_output(tensor)
        found = evaluate(self.n, self.feeds, self.kept)
        return [found[f"out{index}"] for index in range(len(outputs))]


def close(found: np.ndarray, wanted: torch.Tensor | np.ndarray, tolerance: float = 1e-6) -> None:
    wanted = np.asarray(wanted, np.float32)
    assert found.shape == wanted.shape
    error = np.abs(found.astype(np.float32) - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"
