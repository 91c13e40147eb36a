"""The evaluator against torch, one small network a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.tensorrt.evaluator_nets import EW
from support.tensorrt.small_networks import BF16, FP8, close, trt

ELEMENTWISE: dict[str, tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "SUM": (EW.SUM, torch.add),
    "PROD": (EW.PROD, torch.mul),
    "SUB": (EW.SUB, torch.sub),
    "DIV": (EW.DIV, torch.div),
    "MAX": (EW.MAX, torch.maximum),
    "MIN": (EW.MIN, torch.minimum),
    "LESS": (EW.LESS, torch.lt),
    "GREATER": (EW.GREATER, torch.gt),
    "EQUAL": (EW.EQUAL, torch.eq),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_broadcast_as_torch_does(name, net, rng) -> None:
    op, wanted = ELEMENTWISE[name]
    a, b = rng.standard_normal((3, 1, 5), np.float32), rng.standard_normal((1, 4, 5), np.float32)
    b[0, 1] = a[0, 0]
    (found,) = net.run(net.n.add_elementwise(net.feed("a", a), net.feed("b", b), op).get_output(0))
    expected = wanted(torch.from_numpy(a), torch.from_numpy(b))
    assert np.array_equal(found, expected.numpy())


@pytest.mark.parametrize("op, wanted", [(EW.DIV, -3), (EW.FLOOR_DIV, -4)])
def test_integers_divide_towards_zero_or_down(op, wanted, net) -> None:
    a, b = np.array([-7], np.int32), np.array([2], np.int32)
    (found,) = net.run(net.n.add_elementwise(net.feed("a", a), net.feed("b", b), op).get_output(0))
    assert found.dtype == np.int32 and found.tolist() == [wanted]


@pytest.mark.parametrize(
    "op, wanted",
    [
        (trt.UnaryOperation.SQRT, torch.sqrt),
        (trt.UnaryOperation.RECIP, torch.reciprocal),
        (trt.UnaryOperation.LOG, torch.log),
        (trt.UnaryOperation.EXP, torch.exp),
        (trt.UnaryOperation.NEG, torch.neg),
        (trt.UnaryOperation.ABS, torch.abs),
    ],
)
def test_unary_operations_equal_those_of_torch(op, wanted, net, rng) -> None:
    x = rng.uniform(0.1, 3, (4, 5)).astype(np.float32)
    (found,) = net.run(net.n.add_unary(net.feed("x", x), op).get_output(0))
    close(found, wanted(torch.from_numpy(x)))


def test_results_are_rounded_to_the_type_of_their_tensor(net, rng) -> None:
    x = rng.standard_normal((64,), np.float32).astype(BF16)
    product = net.n.add_elementwise(net.feed("x", x), net.constant(x), EW.PROD).get_output(0)
    half = net.n.add_cast(product, trt.float16).get_output(0)
    found, narrow = net.run(product, half)
    wide = torch.from_numpy(x.astype(np.float32)).bfloat16()
    assert found.dtype == BF16 and narrow.dtype == np.float16
    assert np.array_equal(found.astype(np.float32), (wide * wide).float().numpy())
    assert np.array_equal(narrow, (wide * wide).half().numpy())


@pytest.mark.parametrize(
    "kind, wanted",
    [(trt.ActivationType.SIGMOID, torch.sigmoid), (trt.ActivationType.RELU, torch.relu)],
)
def test_activations_equal_those_of_torch(kind, wanted, net, rng) -> None:
    x = rng.standard_normal((4, 5), np.float32)
    (found,) = net.run(net.n.add_activation(net.feed("x", x), kind).get_output(0))
    close(found, wanted(torch.from_numpy(x)))


@pytest.mark.parametrize("keep", [True, False])
def test_reductions_run_over_the_axes_of_their_mask(keep, net, rng) -> None:
    x = rng.standard_normal((2, 3, 4), np.float32)
    fed = net.feed("x", x)
    outs = [
        net.n.add_reduce(fed, op, axes, keep).get_output(0)
        for op, axes in (
            (trt.ReduceOperation.AVG, 4),
            (trt.ReduceOperation.MAX, 2),
            (trt.ReduceOperation.SUM, 5),
        )
    ]
    mean, largest, total = net.run(*outs)
    t = torch.from_numpy(x)
    close(mean, t.mean(2, keepdim=keep))
    close(largest, t.amax(1, keepdim=keep))
    close(total, t.sum((0, 2), keepdim=keep))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16])
def test_products_are_summed_in_float32_and_rounded_once(dtype, net, rng) -> None:
    x = rng.standard_normal((3, 4, 40), np.float32).astype(dtype)
    w = rng.standard_normal((1, 7, 40), np.float32).astype(dtype)
    op = trt.MatrixOperation
    product = net.n.add_matrix_multiply(net.feed("x", x), op.NONE, net.constant(w), op.TRANSPOSE)
    (found,) = net.run(product.get_output(0))
    wanted = x.astype(np.float32) @ w.astype(np.float32).swapaxes(1, 2)
    assert found.dtype == dtype and np.array_equal(found, wanted.astype(dtype))


def test_quantization_saturates_and_rounds_as_torch_does(net, rng) -> None:
    x = rng.standard_normal((6, 33), np.float32) * 300
    scale = np.array(0.7, np.float32)
    s = net.constant(scale)
    eighth = net.n.add_quantize(net.feed("x", x), s, trt.fp8).get_output(0)
    back = net.n.add_dequantize(eighth, s, trt.float32).get_output(0)
    found, again = net.run(eighth, back)
    wanted = (torch.from_numpy(x) / 0.7).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert found.dtype == FP8
    assert np.array_equal(found.astype(np.float32), wanted.float().numpy())
    close(again, wanted.float() * 0.7)


def test_scales_of_a_channel_multiply_its_row(net, rng) -> None:
    w = rng.standard_normal((5, 8), np.float32).astype(FP8)
    scale = rng.uniform(0.1, 2, 5).astype(np.float32)
    layer = net.n.add_dequantize(net.constant(w), net.constant(scale), trt.float16)
    layer.axis = 0
    (found,) = net.run(layer.get_output(0))
    assert np.array_equal(found, (w.astype(np.float32) * scale[:, None]).astype(np.float16))


def test_gathers_pick_rows_elements_and_tuples(net, rng) -> None:
    x = rng.standard_normal((3, 4, 5), np.float32)
    rows, picks = np.array([[2, 0]], np.int32), rng.integers(0, 4, (3, 2, 5)).astype(np.int32)
    pairs = np.array([[[3, 1]], [[0, 4]], [[2, 2]]], np.int32)
    fed = net.feed("x", x)
    plain = net.n.add_gather(fed, net.feed("rows", rows), 1).get_output(0)
    element = net.n.add_gather_v2(fed, net.feed("picks", picks), trt.GatherMode.ELEMENT)
    element.axis = 1
    nd = net.n.add_gather_v2(fed, net.feed("pairs", pairs, (-1, -1, 2)), trt.GatherMode.ND)
    nd.num_elementwise_dims = 1
    found, elements, tuples = net.run(plain, element.get_output(0), nd.get_output(0))
    t = torch.from_numpy(x)
    assert np.array_equal(found, t[:, [[2, 0]]].numpy())
    index = torch.from_numpy(picks).long()
    assert np.array_equal(elements, torch.gather(t, 1, index).numpy())
    assert np.array_equal(tuples[:, 0], np.array([x[0, 3, 1], x[1, 0, 4], x[2, 2, 2]]))


def test_an_index_outside_its_axis_is_an_error(net, rng) -> None:
    x = net.feed("x", rng.standard_normal((3, 4), np.float32))
    picked = net.n.add_gather(x, net.feed("i", np.array([-1], np.int32)), 0)
    with pytest.raises(AssertionError, match="an index outside"):
        net.run(picked.get_output(0))


def test_slices_take_their_size_from_a_tensor(net, rng) -> None:
    x = rng.standard_normal((5, 9), np.float32)
    fed = net.feed("x", x)
    shape = net.n.add_shape(fed).get_output(0)
    lead = net.n.add_slice(shape, (0,), (1,), (1,)).get_output(0)
    size = net.n.add_concatenation([lead, net.constant(np.array([4], np.int64))]).get_output(0)
    cut = net.n.add_slice(fed, (0, 3), (0, 0), (1, 1))
    cut.set_input(2, size)
    strided = net.n.add_slice(fed, (1, 0), (2, 3), (2, 3)).get_output(0)
    found, coarse = net.run(cut.get_output(0), strided)
    assert np.array_equal(found, x[:, 3:7]) and np.array_equal(coarse, x[1::2, ::3])


def test_a_slice_past_the_end_is_an_error(net, rng) -> None:
    fed = net.feed("x", rng.standard_normal((5, 9), np.float32))
    with pytest.raises(AssertionError, match="3:8:1 of 9"):
        net.run(net.n.add_slice(fed, (0, 3), (5, 8), (1, 1)).get_output(0))


def test_shuffles_transpose_reshape_and_transpose(net, rng) -> None:
    x = rng.standard_normal((2, 3, 8), np.float32)
    layer = net.n.add_shuffle(net.feed("x", x))
    layer.first_transpose = trt.Permutation((1, 0, 2))
    layer.reshape_dims = (0, -1, 4)
    layer.second_transpose = trt.Permutation((0, 2, 1))
    turned = net.n.add_shuffle(net.feed("y", x))
    turned.first_transpose = trt.Permutation((2, 0, 1))
    found, only = net.run(layer.get_output(0), turned.get_output(0))
    assert np.array_equal(found, x.transpose(1, 0, 2).reshape(3, 4, 4).transpose(0, 2, 1))
    assert np.array_equal(only, x.transpose(2, 0, 1))


def test_concatenation_selection_and_casts(net, rng) -> None:
    a, b = rng.standard_normal((2, 3), np.float32), rng.standard_normal((2, 2), np.float32)
    fed = net.feed("a", a)
    joined = net.n.add_concatenation([fed, net.feed("b", b)])
    joined.axis = 1
    zero = net.constant(np.zeros((1, 1), np.float32))
    is_positive = net.n.add_elementwise(fed, zero, EW.GREATER).get_output(0)
    chosen = net.n.add_select(is_positive, fed, zero).get_output(0)
    counted = net.n.add_cast(is_positive, trt.int32).get_output(0)
    whole = net.n.add_cast(fed, trt.int32).get_output(0)
    both, positive, count, truncated = net.run(joined.get_output(0), chosen, counted, whole)
    assert np.array_equal(both, np.concatenate([a, b], 1))
    assert np.array_equal(positive, np.maximum(a, 0))
    assert np.array_equal(count, (a > 0).astype(np.int32))
    assert np.array_equal(truncated, np.trunc(a).astype(np.int32))


def test_topk_gives_the_lowest_index_of_equals(net) -> None:
    x = np.array([[1, 5, 5, 2], [7, 7, 7, 7]], np.float32)
    layer = net.n.add_topk(net.feed("x", x), trt.TopKOperation.MAX, 2, 2)
    values, indices = net.run(layer.get_output(0), layer.get_output(1))
    assert values.tolist() == [[5, 5], [7, 7]]
    assert indices.dtype == np.int32 and indices.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_running_sums_of_integers(is_exclusive, net) -> None:
    x = np.array([[1, 0, 1, 1]], np.int32)
    sums = trt.CumulativeOperation.SUM
    axis = net.constant(np.array(1, np.int32))
    layer = net.n.add_cumulative(net.feed("x", x), axis, sums, is_exclusive, False)
    (found,) = net.run(layer.get_output(0))
    assert found.tolist() == [[0, 1, 1, 2] if is_exclusive else [1, 1, 2, 3]]


def test_softmax_equals_that_of_torch(net, rng) -> None:
    x = rng.standard_normal((2, 3, 7), np.float32) * 20
    layer = net.n.add_softmax(net.feed("x", x))
    layer.axes = 4
    (found,) = net.run(layer.get_output(0))
    close(found, torch.softmax(torch.from_numpy(x), 2))
