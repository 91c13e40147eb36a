"""Evaluates TensorRT networks with numpy, so that what a plan computes is checked without a GPU.

What is walked is the `INetworkDefinition` that the builder compiles, in dependency order, with
every value rounded to the type of its tensor. TensorRT may fuse layers and keep more precision
between them than the network says, so agreement is within tolerances, not bit for bit.

A layer, or a use of one, that has no rule here raises `UnknownLayer`: nothing is skipped.
"""

from support.tensorrt.evaluator.errors import BadFeed, UnknownLayer
from support.tensorrt.evaluator.types import dtype_of
from support.tensorrt.evaluator.walk import Evaluator, evaluate, evaluate_ranks

__all__ = ["BadFeed", "Evaluator", "UnknownLayer", "dtype_of", "evaluate", "evaluate_ranks"]
