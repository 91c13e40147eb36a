"""TensorRT's types as numpy's; the narrow floats are those of ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from support.tensorrt.evaluator.errors import UnknownLayer

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8_MAX = 448.0  # largest finite E4M3 value
_DTYPES = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": BF16,
    "FP8": FP8,
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "BOOL": np.dtype(bool),
}


def dtype_of(kind: Any) -> np.dtype:
    """The numpy dtype of a `trt.DataType`."""
    if kind.name not in _DTYPES:
        raise UnknownLayer(f"tensors of type {kind.name}")
    return _DTYPES[kind.name]


def is_float(array: np.ndarray) -> bool:
    """True for every float type, the narrow ones included."""
    return array.dtype in (FP8, BF16) or array.dtype.kind == "f"


# Much faster than ml_dtypes' conversion, by which it was made.
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)


def wide(array: np.ndarray) -> np.ndarray:
    """Floats as float32, in which all arithmetic happens; integers and booleans as they are."""
    if array.dtype == FP8:
        return _FP8_VALUES[array.view(np.uint8)]
    if array.dtype == BF16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if is_float(array) else array


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The value as a tensor of `dtype` holds it; overflow to infinity is silent, as on a GPU."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return array.astype(dtype)


def saturated(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 -> FP8 or INT8 as quantization does it: clamped, then rounded to nearest even."""
    if dtype == FP8:
        return np.clip(array, -FP8_MAX, FP8_MAX).astype(FP8)
    raise UnknownLayer(f"quantization to {dtype}")
