"""Networks that the evaluator walks in order, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from support.tensorrt.evaluator import BadFeed, UnknownLayer, evaluate, evaluate_ranks
from support.tensorrt.evaluator_nets import EW
from support.tensorrt.small_networks import FP8, Net, trt


def test_layers_wired_to_later_ones_are_computed_in_order(net, rng) -> None:
    x = rng.standard_normal((3,), np.float32)
    fed = net.feed("x", x)
    first = net.n.add_elementwise(fed, fed, EW.SUM)
    later = net.n.add_elementwise(fed, fed, EW.PROD)
    first.set_input(1, later.get_output(0))
    (found,) = net.run(first.get_output(0))
    assert np.array_equal(found, x + x * x)


def test_ranks_meet_in_their_collective(rng) -> None:
    parts = [rng.standard_normal((2, 3), np.float32).astype(np.float16) for _ in range(2)]
    nets = [Net(), Net()]
    for net, part in zip(nets, parts, strict=True):
        reduce = trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM
        layer = net.n.add_dist_collective(net.feed("x", part), *reduce, -1, [])
        layer.num_ranks = 2
        layer.get_output(0).name = "out"
        net.n.mark_output(layer.get_output(0))
    found = evaluate_ranks([net.n for net in nets], [net.feeds for net in nets])
    wanted = (parts[0].astype(np.float32) + parts[1].astype(np.float32)).astype(np.float16)
    assert all(np.array_equal(outputs["out"], wanted) for outputs in found)


def test_a_layer_without_a_rule_is_refused_by_name(net, rng) -> None:
    fed = net.feed("x", rng.standard_normal((1, 1, 4, 4), np.float32))
    pooled = net.n.add_pooling_nd(fed, trt.PoolingType.MAX, (2, 2))
    with pytest.raises(UnknownLayer, match="kind POOLING"):
        net.run(pooled.get_output(0))


def test_an_operation_without_a_rule_is_refused_by_name(net, rng) -> None:
    fed = net.feed("x", rng.standard_normal((4,), np.float32))
    with pytest.raises(UnknownLayer, match="ERF"):
        net.run(net.n.add_unary(fed, trt.UnaryOperation.ERF).get_output(0))


def test_constants_that_cannot_be_read_back_must_be_given(net, rng) -> None:
    w = net.constant(rng.standard_normal((2, 2), np.float32).astype(FP8))
    scale = net.constant(np.array(1, np.float32))
    net.kept = {}
    with pytest.raises(UnknownLayer, match="give them as `constants`"):
        net.run(net.n.add_dequantize(w, scale, trt.float32).get_output(0))


@pytest.mark.parametrize(
    "feeds, found",
    [
        ({}, "'x' is an input not given"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros(1)}, "'y' is not an input"),
        ({"x": np.zeros((2, 3), np.float16)}, r"x is float16\[2, 3\], wanted float32\[-1, 3\]"),
        ({"x": np.zeros((2, 4), np.float32)}, r"x is float32\[2, 4\]"),
    ],
)
def test_feeds_are_those_of_the_network(feeds, found, net) -> None:
    fed = net.feed("x", np.zeros((2, 3), np.float32), (-1, 3))
    out = net.n.add_identity(fed).get_output(0)
    net.n.mark_output(out)
    with pytest.raises(BadFeed, match=found):
        evaluate(net.n, feeds)
