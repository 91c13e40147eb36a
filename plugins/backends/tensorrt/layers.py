"""Helpers for adding operators to a TensorRT network.

`plugins/ops/<op>/tensorrt.py` has one function:

    add_layers(net, inputs, outputs, attributes) -> {role: ITensor}

`inputs` has TensorRT tensors by role, `outputs` gives the dtype and shape of each output role.
Activations are two-dimensional, [tokens, width]; a vector of a spec is a row here ([1, width], a
weight) or a column ([tokens, 1], a scale per token). The networks are strongly typed, so every
rounding of the reference is a cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.op_spec import FP8, FP8_MAX, MODEL_DTYPES

T = TypeVar("T")
ITensor = Any  # of either package; neither has types
# Smaller than the scale of any row that is not all zeros; a row of zeros stays zeros.
_SMALLEST_SCALE = 1e-30


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that a node must compute."""

    dtype: str  # torch's name
    shape: tuple[int | str, ...]


def tensorrt_dtype(trt: Any, dtype: str) -> Any:
    """The package's data type of torch's name."""
    return getattr(trt, "fp8" if dtype == FP8 else dtype)


def model_dtype(trt: Any, x: ITensor) -> str:
    """Torch's name of the type of an activation that is not quantized."""
    return next(name for name in MODEL_DTYPES if x.dtype == tensorrt_dtype(trt, name))


class Layers:
    """One network under construction.

    trt: the package. step: the arrays of a step that are inputs of this network, by their names in
    `StepInputs`. constants: every constant by the name of its tensor; the network refers to their
    memory, so this object must outlive the build.
    """

    def __init__(self, trt: Any, network: Any, num_ranks: int = 1) -> None:
        self.trt = trt
        self.network = network
        self.num_ranks = num_ranks
        self.step: dict[str, ITensor] = {}
        self.constants: dict[str, NDArray[Any]] = {}
        self.scope = ""  # the node whose layers are added: what layers are named after
        self._shared: dict[Any, ITensor] = {}
        self._names: dict[str, int] = {}
        self._made: dict[str, Any] = {}

    # ---- inputs, outputs, constants ----

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> ITensor:
        """A tensor that the caller binds; -1 is a dimension that steps decide."""
        return self.network.add_input(name, tensorrt_dtype(self.trt, dtype), tuple(shape))

    def output(self, tensor: ITensor, name: str) -> None:
        """Let the caller bind `tensor` as `name`."""
        tensor.name = name
        self.network.mark_output(tensor)

    def constant(self, values: Any, dtype: Any = np.float32) -> ITensor:
        """A small constant; equal ones are one tensor."""
        array = np.ascontiguousarray(np.asarray(values, dtype)).reshape(np.shape(values))
        key = (array.shape, array.dtype.str, array.tobytes())
        if key not in self._shared:
            layer = self._named(
                self.network.add_constant(array.shape, self.trt.Weights(array)), "constant"
            )
            self._shared[key] = self._first(layer)
            self.constants[self._shared[key].name] = array
        return self._shared[key]

    # ---- arithmetic; `op` is the package's own name of it ----

    def cast(self, x: ITensor, dtype: str) -> ITensor:
        """x rounded to `dtype` (torch's name)."""
        wanted = tensorrt_dtype(self.trt, dtype)
        if x.dtype == wanted:
            return x
        return self._first(self._named(self.network.add_cast(x, wanted), "cast"))

    def elementwise(self, x: ITensor, y: ITensor, op: str) -> ITensor:
        """SUM, PROD, SUB, DIV, MAX, EQUAL, LESS ... of tensors of one type and rank."""
        kind = getattr(self.trt.ElementWiseOperation, op)
        return self._first(self._named(self.network.add_elementwise(x, y, kind), op.lower()))

    def add(self, x: ITensor, y: ITensor) -> ITensor:
        """x + y."""
        return self.elementwise(x, y, "SUM")

    def multiply(self, x: ITensor, y: ITensor) -> ITensor:
        """x * y."""
        return self.elementwise(x, y, "PROD")

    def scale(self, x: ITensor, factor: float) -> ITensor:
        """x (float32) times a number."""
        return self.multiply(x, self._scalar(factor, len(x.shape)))

    def unary(self, x: ITensor, op: str) -> ITensor:
        """SQRT, RECIP, ABS, NOT ..."""
        kind = getattr(self.trt.UnaryOperation, op)
        return self._first(self._named(self.network.add_unary(x, kind), op.lower()))

    def reduce(self, x: ITensor, op: str, axis: int, keep: bool = True) -> ITensor:
        """SUM, AVG or MAX over one axis."""
        kind = getattr(self.trt.ReduceOperation, op)
        layer = self.network.add_reduce(x, kind, 1 << axis, keep)
        return self._first(self._named(layer, f"reduce_{op.lower()}"))

    def sigmoid(self, x: ITensor) -> ITensor:
        """1 / (1 + exp(-x))."""
        kind = self.trt.ActivationType.SIGMOID
        return self._first(self._named(self.network.add_activation(x, kind), "sigmoid"))

    def matmul(self, x: ITensor, weight: ITensor, name: str) -> ITensor:
        """x [N, K] times weight [O, K] transposed."""
        ops = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, ops.NONE, weight, ops.TRANSPOSE)
        return self._first(self._named(layer, name))

    # ---- FP8 ----

    def quantize(self, x: ITensor) -> ITensor:
        """x (float32), saturated and rounded to FP8 without a scale."""
        one = self.constant(np.float32(1.0))
        layer = self.network.add_quantize(x, one, tensorrt_dtype(self.trt, FP8))
        return self._first(self._named(layer, "quantize"))

    def dequantize(self, x: ITensor) -> ITensor:
        """The float32 values of an FP8 tensor."""
        one = self.constant(np.float32(1.0))
        layer = self.network.add_dequantize(x, one, tensorrt_dtype(self.trt, "float32"))
        return self._first(self._named(layer, "dequantize"))

    def finish(
        self, y: ITensor, inputs: Mapping[str, ITensor], outputs: Mapping[str, Wanted]
    ) -> dict[str, ITensor]:
        """The roles `out` and `out_scale` of y [N, K]: unchanged, or quantized if a role says so.

        The scale divides outside the quantization, as in the reference; so scales can be inputs,
        and the product that follows still becomes an FP8 GEMM.
        """
        if outputs["out"].dtype != FP8:
            return {"out": self.cast(y, outputs["out"].dtype)}
        wide = self.cast(y, "float32")
        if "out_scale" in outputs:
            largest = self.reduce(self.unary(wide, "ABS"), "MAX", 1)
            # Divided, not multiplied by 1 / 448: with a scale that is one bit off some values would
            # round to other FP8 numbers.
            scale = self.elementwise(largest, self._scalar(FP8_MAX, 2), "DIV")
            scale = self.elementwise(scale, self._scalar(_SMALLEST_SCALE, 2), "MAX")
            quantized = self.quantize(self.elementwise(wide, scale, "DIV"))
            return {"out": quantized, "out_scale": scale}
        return {"out": self.quantize(self.elementwise(wide, inputs["scale"], "DIV"))}

    # ---- shapes ----

    def shape(self, x: ITensor) -> ITensor:
        """The dimensions of x, int64."""
        return self._first(self._named(self.network.add_shape(x), "shape"))

    def shuffle(
        self,
        x: ITensor,
        dims: Sequence[int] | None = None,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
        dims_from: ITensor | None = None,
    ) -> ITensor:
        """Transpose by `before`, reshape to `dims` (0 keeps, -1 fits) or to the integers of
        `dims_from`, transpose by `after`."""
        layer = self._named(self.network.add_shuffle(x), "shuffle")
        if before is not None:
            layer.first_transpose = self.trt.Permutation(tuple(before))
        if dims_from is not None:
            layer.set_input(1, dims_from)
        elif dims is not None:
            layer.reshape_dims = tuple(dims)
        if after is not None:
            layer.second_transpose = self.trt.Permutation(tuple(after))
        return self._first(layer)

    def concatenate(self, tensors: Sequence[ITensor], axis: int = 0) -> ITensor:
        """Tensors joined along an axis."""
        layer = self._named(self.network.add_concatenation(list(tensors)), "concatenate")
        layer.axis = axis
        return self._first(layer)

    def columns(self, x: ITensor, start: int, stop: int) -> ITensor:
        """x[..., start:stop], whatever the leading dimensions are."""
        rank = len(x.shape)
        lead = self.network.add_slice(self.shape(x), (0,), (rank - 1,), (1,))
        size = self.concatenate(
            [self._first(self._named(lead, "lead")), self.constant([stop - start], np.int64)]
        )
        layer = self.network.add_slice(x, (0,) * (rank - 1) + (start,), (0,) * rank, (1,) * rank)
        layer.set_input(2, size)
        return self._first(self._named(layer, "columns"))

    def gather(self, table: ITensor, indices: ITensor, axis: int = 0) -> ITensor:
        """Rows of `table` by index."""
        return self._first(self._named(self.network.add_gather(table, indices, axis), "gather"))

    def gather_batched(self, table: ITensor, indices: ITensor, batch_dims: int = 1) -> ITensor:
        """table[b, indices[b, i]] for every b of the first `batch_dims` dimensions."""
        index = self.shuffle(indices, (0,) * len(indices.shape) + (1,))
        layer = self.network.add_gather_v2(table, index, self.trt.GatherMode.ND)
        layer.num_elementwise_dims = batch_dims
        return self._first(self._named(layer, "gather"))

    def argmax(self, x: ITensor) -> tuple[ITensor, ITensor]:
        """(largest value, its index: int32) of every row of x [N, K], as [N, 1]."""
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, 1, 1 << 1)
        self._named(layer, "argmax")
        return layer.get_output(0), layer.get_output(1)

    def running_sum(self, x: ITensor, axis: int) -> ITensor:
        """Sums of x from the start of an axis to each element, itself included."""
        kind = self.trt.CumulativeOperation.SUM
        at = self.constant(np.int32(axis), np.int32)
        layer = self.network.add_cumulative(x, at, kind, False, False)
        return self._first(self._named(layer, "running_sum"))

    def select(self, condition: ITensor, x: ITensor, y: ITensor) -> ITensor:
        """x where the condition holds, y elsewhere."""
        return self._first(self._named(self.network.add_select(condition, x, y), "select"))

    # ---- bookkeeping ----

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returns the first time that it is asked for under this key."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def name(self, layer: Any, what: str) -> Any:
        """Name a layer that an operator added itself; returns its first output."""
        return self._first(self._named(layer, what))

    def _scalar(self, value: float, rank: int) -> ITensor:
        return self.constant(np.full((1,) * rank, value, np.float32))

    def _named(self, layer: Any, what: str) -> Any:
        assert layer is not None, f"{self.scope}: TensorRT made no layer for {what}"
        name = f"{self.scope}.{what}" if what else self.scope
        count = self._names[name] = self._names.get(name, 0) + 1
        layer.name = name if count == 1 else f"{name}.{count}"
        return layer

    @staticmethod
    def _first(layer: Any) -> ITensor:
        return layer.get_output(0)
