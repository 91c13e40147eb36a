"""The evaluator's attention, rotary embedding and cache update against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.tensorrt.evaluator import UnknownLayer
from support.tensorrt.small_networks import BF16, Net, close, trt

BATCH, HEADS, KV_HEADS, CAPACITY, SIZE = 2, 4, 2, 24, 16
LENGTHS = np.array([9, 24], np.int32)
SOFTMAX = trt.AttentionNormalizationOp.SOFTMAX
KIND = trt.CausalMaskKind


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def qkv(rng: np.random.Generator, count: int, dtype: Any = np.float32) -> list[np.ndarray]:
    shapes = [(BATCH, HEADS, count, SIZE)] + [(BATCH, KV_HEADS, CAPACITY, SIZE)] * 2
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def attention(net: Net, arrays: list[np.ndarray], kind: Any) -> Any:
    names = [net.feed(name, array) for name, array in zip("qkv", arrays, strict=True)]
    return net.n.add_attention_v2(*names, SOFTMAX, kind)


def wanted(arrays: list[np.ndarray], mask: np.ndarray) -> torch.Tensor:
    """torch's attention without a scale; a bool mask or one that is added."""
    q, k, v = (torch.from_numpy(array.astype(np.float32)) for array in arrays)
    k, v = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (k, v))
    bias = torch.from_numpy(mask)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=1.0)


def causal(count: int, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """[B, 1, S, C]: the last S of `length` positions, each seeing what is before it."""
    rows = lengths[:, None] - count + np.arange(count)
    return np.arange(CAPACITY) <= rows[:, None, :, None]


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_lower_right_is_anchored_at_each_length(count, dtype, net, rng) -> None:
    arrays = qkv(rng, count, dtype)
    layer = attention(net, arrays, KIND.LOWER_RIGHT)
    layer.key_value_lengths = net.feed("lengths", LENGTHS)
    (found,) = net.run(layer.get_output(0))
    assert found.dtype == dtype
    close(found, wanted(arrays, causal(count)), 4e-3 if dtype == BF16 else 5e-4)


def test_lower_right_without_lengths_ends_at_the_capacity(net, rng) -> None:
    arrays = qkv(rng, 3)
    (found,) = net.run(attention(net, arrays, KIND.LOWER_RIGHT).get_output(0))
    close(found, wanted(arrays, causal(3, np.array([CAPACITY] * BATCH))), 1e-5)


def test_upper_left_ignores_where_the_sequence_ends(net, rng) -> None:
    arrays = qkv(rng, 4)
    (found,) = net.run(attention(net, arrays, KIND.UPPER_LEFT).get_output(0))
    close(found, wanted(arrays, causal(4, np.array([4] * BATCH))), 1e-5)


@pytest.mark.parametrize("is_bool", [True, False])
def test_masks_say_which_keys_are_seen(is_bool, net, rng) -> None:
    arrays = qkv(rng, 5)
    mask = rng.random((BATCH, 1, 5, CAPACITY)) < 0.4
    mask[..., 0] = True
    given = mask if is_bool else np.where(mask, rng.standard_normal(mask.shape), -1e9)
    given = given if is_bool else given.astype(np.float32)
    layer = attention(net, arrays, KIND.NONE)
    layer.mask = net.feed("mask", given)
    (found,) = net.run(layer.get_output(0))
    close(found, wanted(arrays, given), 1e-5)


def test_a_mask_and_lengths_hold_together(net, rng) -> None:
    arrays = qkv(rng, 5)
    mask = rng.random((BATCH, 1, 5, CAPACITY)) < 0.5
    mask[..., 0] = True
    layer = attention(net, arrays, KIND.NONE)
    layer.mask = net.feed("mask", mask)
    layer.key_value_lengths = net.feed("lengths", LENGTHS)
    (found,) = net.run(layer.get_output(0))
    valid = np.arange(CAPACITY) < LENGTHS[:, None, None, None]
    close(found, wanted(arrays, mask & valid), 1e-5)


def test_weights_are_quantized_where_the_layer_says_so(net, rng) -> None:
    arrays = qkv(rng, 5)
    arrays[0] *= 0.2
    layer = attention(net, arrays, KIND.LOWER_RIGHT)
    layer.normalization_quantize_scale = net.constant(np.array(1 / 448, np.float32))
    layer.normalization_quantize_to_type = trt.fp8
    (found,) = net.run(layer.get_output(0))
    q, k, v = (torch.from_numpy(array) for array in arrays)
    k, v = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (k, v))
    mask = torch.from_numpy(causal(5, np.array([CAPACITY] * BATCH)))
    weights = torch.softmax((q @ k.mT).masked_fill(~mask, -torch.inf), -1)
    narrow = (weights * 448).to(torch.float8_e4m3fn).float() / 448
    close(found, narrow @ v, 1e-2)
    assert np.abs(found - (weights @ v).numpy()).max() > 1e-3, "the rounding shows"


def test_a_row_that_sees_nothing_shows_as_nan(net, rng) -> None:
    layer = attention(net, qkv(rng, 1), KIND.LOWER_RIGHT)
    layer.key_value_lengths = net.feed("lengths", np.array([0, 3], np.int32))
    (found,) = net.run(layer.get_output(0))
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_packed_queries_are_refused(net, rng) -> None:
    arrays = qkv(rng, 1)
    names = [net.feed("q", arrays[0][:, :, 0]), *map(net.feed, "kv", arrays[1:])]
    layer = net.n.add_attention_v2(*names, SOFTMAX, KIND.LOWER_RIGHT)
    layer.query_form = trt.AttentionIOForm.PACKED_NHD
    layer.query_lengths = net.feed("cu", np.arange(BATCH + 1, dtype=np.int32))
    with pytest.raises(UnknownLayer, match="PACKED_NHD"):
        net.run(layer.get_output(0))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotary_embedding_turns_pairs_by_their_position(is_interleaved, net, rng) -> None:
    x = rng.standard_normal((BATCH, HEADS, 3, SIZE), np.float32)
    ids = np.array([[0, 7, 2], [11, 3, 3]], np.int32)
    angles = np.outer(np.arange(12), 100.0 ** (-np.arange(0, SIZE, 2) / SIZE)).astype(np.float32)
    tables = [net.constant(np.cos(angles)), net.constant(np.sin(angles))]
    layer = net.n.add_rotary_embedding(
        net.feed("x", x, (-1, HEADS, -1, SIZE)), *tables, is_interleaved, 0
    )
    layer.set_input(3, net.feed("ids", ids))
    (found,) = net.run(layer.get_output(0))
    pairs = x.reshape(*x.shape[:-1], -1, 2) if is_interleaved else None
    first = pairs[..., 0] if pairs is not None else x[..., : SIZE // 2]
    second = pairs[..., 1] if pairs is not None else x[..., SIZE // 2 :]
    turned = (first + 1j * second) * np.exp(1j * angles[ids])[:, None]
    both = (turned.real, turned.imag)
    whole = np.stack(both, -1).reshape(x.shape) if is_interleaved else np.concatenate(both, -1)
    close(found, whole, 1e-6)


@pytest.mark.parametrize("is_packed", [False, True])
def test_cache_updates_write_behind_what_is_there(is_packed, net, rng) -> None:
    cache = rng.standard_normal((BATCH, KV_HEADS, CAPACITY, SIZE), np.float32).astype(np.float16)
    counts = [2, 3] if is_packed else [3, 3]
    new = [rng.standard_normal((KV_HEADS, n, SIZE), np.float32) for n in counts]
    first = np.array([0, 20], np.int32)
    shape = (-1, KV_HEADS, CAPACITY, SIZE)
    padded = np.stack(new) if not is_packed else np.concatenate([n.swapaxes(0, 1) for n in new])
    update = net.feed(
        "new",
        padded.astype(np.float16),
        (-1, KV_HEADS, SIZE) if is_packed else (-1, KV_HEADS, -1, SIZE),
    )
    layer = net.n.add_kv_cache_update(
        net.feed("cache", cache, shape), update, net.feed("first", first), trt.KVCacheMode.LINEAR
    )
    if is_packed:
        layer.update_form = trt.AttentionIOForm.PACKED_NHD
        layer.update_lengths = net.feed("cu", np.array([0, 2, 5], np.int32))
    (found,) = net.run(layer.get_output(0))
    expected = cache.copy()
    for row, at in enumerate(first):
        expected[row, :, at : at + counts[row]] = new[row]
    assert np.array_equal(found, expected)


def test_a_write_past_the_cache_is_an_error(net) -> None:
    cache = net.feed("cache", np.zeros((1, 1, 4, 8), np.float16), (-1, 1, 4, 8))
    new = net.feed("new", np.zeros((1, 1, 2, 8), np.float16), (-1, 1, -1, 8))
    first = net.feed("first", np.array([3], np.int32))
    layer = net.n.add_kv_cache_update(cache, new, first, trt.KVCacheMode.LINEAR)
    with pytest.raises(AssertionError, match="writes past the cache: 5"):
        net.run(layer.get_output(0))
