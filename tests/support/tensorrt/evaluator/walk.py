"""Walks a network's layers in dependency order; the rank networks of a group go in lockstep."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support.tensorrt.evaluator.attention import attend
from support.tensorrt.evaluator.errors import BadFeed, UnknownLayer
from support.tensorrt.evaluator.layer import Layer
from support.tensorrt.evaluator.layers import RULES
from support.tensorrt.evaluator.types import dtype_of, rounded, wide

Values = dict[str, np.ndarray]

_CLASSES = {
    "ACTIVATION": "IActivationLayer",
    "ATTENTION_INPUT": "IAttentionInputLayer",
    "ATTENTION_OUTPUT": "IAttentionOutputLayer",
    "CAST": "ICastLayer",
    "CONCATENATION": "IConcatenationLayer",
    "CONSTANT": "IConstantLayer",
    "CUMULATIVE": "ICumulativeLayer",
    "DEQUANTIZE": "IDequantizeLayer",
    "DIST_COLLECTIVE": "IDistCollectiveLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "GATHER": "IGatherLayer",
    "IDENTITY": "IIdentityLayer",
    "KV_CACHE_UPDATE": "IKVCacheUpdateLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "QUANTIZE": "IQuantizeLayer",
    "REDUCE": "IReduceLayer",
    "ROTARY_EMBEDDING": "IRotaryEmbeddingLayer",
    "SELECT": "ISelectLayer",
    "SHAPE": "IShapeLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "SQUEEZE": "ISqueezeLayer",
    "TOPK": "ITopKLayer",
    "UNARY": "IUnaryLayer",
    "UNSQUEEZE": "IUnsqueezeLayer",
}

_OF_RUNS = {"ATTENTION_INPUT", "ATTENTION_OUTPUT", "DIST_COLLECTIVE"}  # never computed once


class Evaluator:
    """One network, ready to be evaluated again and again.

    `constants` are the arrays of constant layers by the name of their output, for types that
    TensorRT's Python interface does not hand back (FP8, BF16). `fixed` are inputs that are the same
    in all runs. What follows from these and from constants alone is computed once.
    """

    def __init__(
        self,
        network: Any,
        constants: Mapping[str, np.ndarray] | None = None,
        fixed: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.network = network
        kept = constants or {}
        found = [
            narrow(network.get_layer(index), kept, network) for index in range(network.num_layers)
        ]
        self.inputs = {t.name: t for t in map(network.get_input, range(network.num_inputs))}
        self.outputs = [network.get_output(index).name for index in range(network.num_outputs)]
        self._fixed, self.layers = self._checked(fixed or {}), []
        self._given = set(self.inputs) - set(self._fixed)
        for index in dependency_order(found, set(self.inputs)):
            layer = found[index]
            if layer.kind in _OF_RUNS or not set(filter(None, layer.inputs)) <= set(self._fixed):
                self.layers.append(layer)
            else:
                _step(layer, self._fixed)

    def start(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """The values that are known before any layer: the inputs, checked."""
        if set(feeds) != self._given:
            odd = sorted(set(feeds) ^ self._given)[0]
            raise BadFeed(f"{odd!r} is {'not an input' if odd in feeds else 'an input not given'}")
        return self._fixed | self._checked(feeds)

    def _checked(self, feeds: Mapping[str, np.ndarray]) -> Values:
        values = {}
        for name, feed in feeds.items():
            tensor = self.inputs[name]
            array, shape = np.asarray(feed), tuple(tensor.shape)
            fits = len(shape) == array.ndim and all(
                dim in (-1, size) for dim, size in zip(shape, array.shape, strict=True)
            )
            if not fits or array.dtype != dtype_of(tensor.dtype):
                raise BadFeed(
                    f"{name} is {array.dtype}{list(array.shape)}, "
                    f"wanted {dtype_of(tensor.dtype)}{list(shape)}"
                )
            values[name] = array
        return values

    def run(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """All outputs by name. Raises BadFeed and UnknownLayer."""
        return evaluate_together([self], [feeds])[0]


def evaluate(
    network: Any, feeds: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray] | None = None
) -> Values:
    """All outputs of a network by name."""
    return Evaluator(network, constants).run(feeds)


def evaluate_ranks(
    networks: Sequence[Any],
    feeds: Sequence[Mapping[str, np.ndarray]],
    constants: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> list[Values]:
    """All outputs of every rank of a tensor-parallel group, whose collectives meet."""
    kept = constants or [{}] * len(networks)
    ranks = [Evaluator(*pair) for pair in zip(networks, kept, strict=True)]
    return evaluate_together(ranks, feeds)


def evaluate_together(
    ranks: Sequence[Evaluator], feeds: Sequence[Mapping[str, np.ndarray]]
) -> list[Values]:
    """Ranks in lockstep; they have the same layers."""
    values = [rank.start(feed) for rank, feed in zip(ranks, feeds, strict=True)]
    if len({tuple(layer.kind for layer in rank.layers) for rank in ranks}) != 1:
        raise UnknownLayer("rank networks that differ in their layers")
    for steps in zip(*(rank.layers for rank in ranks), strict=True):
        if steps[0].kind == "DIST_COLLECTIVE":
            _all_reduce(steps, values)
            continue
        for layer, known in zip(steps, values, strict=True):
            _step(layer, known)
    return [
        {name: known[name] for name in rank.outputs}
        for rank, known in zip(ranks, values, strict=True)
    ]


def narrow(layer: Any, constants: Mapping[str, np.ndarray], network: Any) -> Layer:
    """A layer as the class of its kind, of which get_layer gives the base only."""
    trt = sys.modules[type(network).__module__.split(".")[0]]
    kind = trt.ILayer.type.fget(layer).name  # a subclass may reuse the name `type`
    if kind not in _CLASSES:
        raise UnknownLayer(f"{layer.name}: layers of kind {kind}")
    layer.__class__ = getattr(trt, _CLASSES[kind])
    return Layer(layer, kind, constants, trt)


def dependency_order(layers: Sequence[Layer], known: set[str]) -> list[int]:
    """Indices in an order that computes before it reads: a layer may be wired to a later one."""
    have, left, order = set(known), list(range(len(layers))), []
    while left:
        waiting = []
        for index in left:
            if set(filter(None, layers[index].inputs)) <= have:
                order.append(index)
                have.update(layers[index].outputs)
            else:
                waiting.append(index)
        if len(waiting) == len(left):
            raise UnknownLayer(f"{layers[left[0]].name} waits for itself")
        left = waiting
    return order


def _step(layer: Layer, known: Values) -> None:
    inputs = [known[name] if name else None for name in layer.inputs]
    if layer.kind == "ATTENTION_INPUT":  # its pair, the output layer, does the work
        results = [np.zeros(0, np.float32)]
        known[layer.outputs[0]] = results[0]
        return
    if layer.kind == "ATTENTION_OUTPUT":
        results = [attend(layer, known)]
    else:
        results = RULES[layer.kind](layer, inputs)
    _store(layer, results, known)


def _store(layer: Layer, results: Sequence[np.ndarray], known: Values) -> None:
    for name, declared, dtype, result in zip(
        layer.outputs, layer.output_shapes, layer.output_dtypes, results, strict=True
    ):
        array = np.asarray(result)
        assert len(declared) == array.ndim and all(
            dim in (-1, size) for dim, size in zip(declared, array.shape, strict=True)
        ), f"{layer.name}: {name} is {array.shape}, the network says {declared}"
        known[name] = rounded(array, dtype)


def _all_reduce(steps: Sequence[Layer], values: Sequence[Values]) -> None:
    """Python cannot read a collective's kind back. A sum over ranks is the one that is built, and
    the only reduction that keeps the shape."""
    parts = []
    for layer, known in zip(steps, values, strict=True):
        if layer.layer.num_ranks not in (1, len(steps)):
            raise UnknownLayer(f"{layer.name} is for {layer.layer.num_ranks} ranks")
        parts.append(wide(known[layer.inputs[0]]))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for layer, known in zip(steps, values, strict=True):
        _store(layer, [total], known)
