"""The rule of every kind of layer but attention: inputs -> outputs, in float32 or integers.

Values come in with the type of their tensor; results are rounded by the walk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from support.tensorrt.evaluator.layer import Layer
from support.tensorrt.evaluator.types import is_float, saturated, wide

Inputs = list[Any]  # arrays, None where an optional input is absent


def _elementwise(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    op = layer.layer.op.name
    if op not in _ELEMENTWISE:
        raise layer.refuse(op)
    if inputs[0].dtype != inputs[1].dtype or inputs[0].ndim != inputs[1].ndim:
        raise layer.refuse(f"{inputs[0].dtype}{inputs[0].shape}, {inputs[1].dtype}")
    with np.errstate(all="ignore"):
        return [_ELEMENTWISE[op](wide(inputs[0]), wide(inputs[1]))]


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a / b if is_float(a) else np.trunc(a / b).astype(a.dtype)


_ELEMENTWISE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "SUB": np.subtract,
    "DIV": _divide,
    "FLOOR_DIV": np.floor_divide,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "POW": np.power,
    "EQUAL": np.equal,
    "LESS": np.less,
    "GREATER": np.greater,
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
}
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SQRT": np.sqrt,
    "RECIP": lambda x: np.float32(1) / x,
    "ABS": np.abs,
    "NEG": np.negative,
    "NOT": np.logical_not,
    "EXP": np.exp,
    "LOG": np.log,
    "FLOOR": np.floor,
    "CEIL": np.ceil,
    "SIGN": np.sign,
    "ISNAN": np.isnan,
}
_REDUCE: dict[str, Any] = {
    "SUM": np.sum,
    "AVG": np.mean,
    "MAX": np.max,
    "MIN": np.min,
    "PROD": np.prod,
}
_ACTIVATION: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "RELU": lambda x: np.maximum(x, 0),
    "TANH": np.tanh,
}


def _unary(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    op = layer.layer.op.name
    if op not in _UNARY:
        raise layer.refuse(op)
    with np.errstate(all="ignore"):
        return [_UNARY[op](wide(inputs[0]))]


def _activation(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    kind = layer.layer.type.name
    if kind not in _ACTIVATION:
        raise layer.refuse(kind)
    with np.errstate(over="ignore"):
        return [_ACTIVATION[kind](wide(inputs[0]))]


def _reduce(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    op, x = layer.layer.op.name, inputs[0]
    if op not in _REDUCE:
        raise layer.refuse(op)
    axes = _axes(layer.layer.axes, x.ndim)
    return [_REDUCE[op](wide(x), axis=axes, keepdims=layer.layer.keep_dims)]


def _axes(mask: int, rank: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if mask >> axis & 1)


def _one_axis(layer: Layer, rank: int) -> int:
    axes = _axes(layer.layer.axes, rank)
    if len(axes) != 1:
        raise layer.refuse(f"axes {axes}")
    return axes[0]


def _matrix_multiply(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    sides = []
    for array, op in zip(inputs, (layer.layer.op0.name, layer.layer.op1.name), strict=True):
        if op == "VECTOR":
            raise layer.refuse("a vector operand")
        sides.append(wide(array).swapaxes(-1, -2) if op == "TRANSPOSE" else wide(array))
    return [sides[0] @ sides[1]]


def _scale(layer: Layer, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A scale as it multiplies x: one number, or one for each slice along the layer's axis."""
    if scale.size == 1:
        return wide(scale).reshape((1,) * x.ndim)
    axis = layer.layer.axis
    if scale.ndim != 1 or not 0 <= axis < x.ndim or len(scale) != x.shape[axis]:
        raise layer.refuse(f"scales {scale.shape} along axis {axis} of {x.shape}")
    return wide(scale).reshape([-1 if at == axis else 1 for at in range(x.ndim)])


def _quantize(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    if len(inputs) > 2:
        raise layer.refuse("a zero point")
    scaled = wide(inputs[0]) / _scale(layer, inputs[0], inputs[1])
    return [saturated(scaled, layer.output_dtypes[0])]


def _dequantize(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    if len(inputs) > 2:
        raise layer.refuse("a zero point")
    return [wide(inputs[0]) * _scale(layer, inputs[0], inputs[1])]


def _shuffle(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    x = inputs[0].transpose(list(layer.layer.first_transpose)[: inputs[0].ndim])
    dims = inputs[1].tolist() if len(inputs) > 1 else _reshape_dims(layer, x)
    if dims is not None:
        keep = layer.layer.zero_is_placeholder
        x = x.reshape([x.shape[i] if dim == 0 and keep else dim for i, dim in enumerate(dims)])
    return [x.transpose(list(layer.layer.second_transpose)[: x.ndim])]


def _reshape_dims(layer: Layer, x: np.ndarray) -> list[int] | None:
    try:
        dims = layer.layer.reshape_dims
    except ValueError:  # never set
        return None
    if dims is None or (list(dims) == [] and layer.output_shapes[0] != ()):
        return None
    return list(dims)


def _slice(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    x, given = inputs[0], [*inputs[1:], None, None, None, None, None][:5]
    if layer.layer.mode.name != "STRICT_BOUNDS" or given[3] is not None or given[4] is not None:
        raise layer.refuse(f"mode {layer.layer.mode.name}, a fill value or axes")
    fixed = ("start", "shape", "stride")
    starts, sizes, strides = (
        list(getattr(layer.layer, name)) if array is None else array.tolist()
        for name, array in zip(fixed, given[:3], strict=True)
    )
    for extent, start, size, stride in zip(x.shape, starts, sizes, strides, strict=True):
        last = start + (size - 1) * stride
        assert size >= 0 and start >= 0 and stride > 0 and (size == 0 or last < extent), (
            f"{layer.name}: {start}:{size}:{stride} of {extent}"
        )
    cuts = zip(starts, sizes, strides, strict=True)
    return [x[tuple(slice(start, start + size * by, by) for start, size, by in cuts)]]


def _gather(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    x, index = inputs
    mode, batch, axis = layer.layer.mode.name, layer.layer.num_elementwise_dims, layer.layer.axis
    if mode == "DEFAULT" and batch == 0:
        _require_inside(layer, index, x.shape[axis])
        return [np.take(x, index, axis)]
    if mode == "ELEMENT":
        _require_inside(layer, index, x.shape[axis])
        return [np.take_along_axis(x, index, axis)]
    if mode != "ND":
        raise layer.refuse(f"mode {mode} with {batch} elementwise dimensions")
    parts = [index[..., at] for at in range(index.shape[-1])]
    for at, part in enumerate(parts):
        _require_inside(layer, part, x.shape[batch + at])
    lead = tuple(np.indices(index.shape[:-1]))[:batch]
    return [x[(*lead, *parts)]]


def _require_inside(layer: Layer, index: np.ndarray, extent: int) -> None:
    assert ((index >= 0) & (index < extent)).all(), (
        f"{layer.name}: an index outside [0, {extent}): {index.min()}..{index.max()}"
    )


def _topk(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    """Of equals the lowest index comes first."""
    x, axis = inputs[0], _one_axis(layer, inputs[0].ndim)
    count = int(inputs[1]) if len(inputs) > 1 else layer.layer.k
    keys = -wide(x) if layer.layer.op.name == "MAX" else wide(x)
    order = np.take(np.argsort(keys, axis, kind="stable"), range(count), axis)
    return [np.take_along_axis(x, order, axis), order]


def _cumulative(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    x, axis = wide(inputs[0]), int(inputs[1])
    if layer.layer.op.name != "SUM" or layer.layer.reverse:
        raise layer.refuse(f"{layer.layer.op.name}, reverse {layer.layer.reverse}")
    total = np.cumsum(x, axis, dtype=x.dtype)
    return [total - x if layer.layer.exclusive else total]


def _softmax(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    x = wide(inputs[0])
    axis = _one_axis(layer, x.ndim)
    powers = np.exp(x - x.max(axis, keepdims=True))
    return [powers / powers.sum(axis, keepdims=True)]


def _rotary(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    """x [B, heads, S, D]; tables [positions, D/2] with ids [B, S], or [B, S, D/2] without."""
    x, (cos, sin) = wide(inputs[0]), map(wide, inputs[1:3])
    if len(inputs) > 3 and inputs[3] is not None:
        _require_inside(layer, inputs[3], len(cos))
        cos, sin = cos[inputs[3]], sin[inputs[3]]
    cos, sin = cos[:, None], sin[:, None]
    width = layer.layer.rotary_embedding_dim or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if layer.layer.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        return [np.concatenate([np.stack(pair, -1).reshape(turned.shape), rest], -1)]
    first, second = turned[..., : width // 2], turned[..., width // 2 :]
    return [np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)]


def _kv_cache_update(layer: Layer, inputs: Inputs) -> list[np.ndarray]:
    """cache [B, heads, capacity, D]; updates padded, or packed with their cumulative lengths."""
    cache, update, first = inputs[0].copy(), inputs[1], inputs[2]
    is_padded = layer.layer.update_form.name == "PADDED_BHND"
    for row in range(len(cache)):
        if is_padded:
            new = update[row]
        else:
            lengths = inputs[3]
            new = update[lengths[row] : lengths[row + 1]].swapaxes(0, 1)
        count, start = new.shape[1], int(first[row])
        if not count:
            continue
        end = start + count
        assert start >= 0 and end <= cache.shape[2], f"{layer.name}: writes past the cache: {end}"
        cache[row, :, start:end] = new
    return [cache]


def _axes_input(rule: Callable[..., np.ndarray]) -> Callable[[Layer, Inputs], list[np.ndarray]]:
    return lambda layer, inputs: [rule(inputs[0], tuple(np.atleast_1d(inputs[1]).tolist()))]


RULES: dict[str, Callable[[Layer, Inputs], list[np.ndarray]]] = {
    "ACTIVATION": _activation,
    "CAST": lambda layer, inputs: [inputs[0]],
    "CONCATENATION": lambda layer, inputs: [np.concatenate(inputs, layer.layer.axis)],
    "CONSTANT": lambda layer, inputs: [layer.constant],
    "CUMULATIVE": _cumulative,
    "DEQUANTIZE": _dequantize,
    "ELEMENTWISE": _elementwise,
    "GATHER": _gather,
    "IDENTITY": lambda layer, inputs: [inputs[0]],
    "KV_CACHE_UPDATE": _kv_cache_update,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "QUANTIZE": _quantize,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rotary,
    "SELECT": lambda layer, inputs: [np.where(*inputs)],
    "SHAPE": lambda layer, inputs: [np.array(inputs[0].shape, np.int64)],
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": _softmax,
    "SQUEEZE": _axes_input(np.squeeze),
    "TOPK": _topk,
    "UNARY": _unary,
    "UNSQUEEZE": _axes_input(np.expand_dims),
}
