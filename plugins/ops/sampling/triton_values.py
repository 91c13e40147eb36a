"""What the sampling kernels compute of single logits: orders, scores, noise and the best draw."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # banned ids lie below
NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# A rough draw (float32) and its exact value differ by less than half of this where it matters: for
# ids that can win. Noise is within 5e-5, scores of at most 32 below the best within 1e-5.
_ROUGH_MARGIN: tl.constexpr = tl.constexpr(1e-3)
_NAN_ORDER: tl.constexpr = tl.constexpr(0x7FFFFFFF)
# Of 1 / temperature: a logit times this is finite, and the least difference of two logits is not
# made up for by any noise.
_MOST: tl.constexpr = tl.constexpr(1e260)


@triton.jit
def order_of(values):
    """float32 -> int32 that compares as the numbers do; -0 equals 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float32 of an `order_of`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_key(values, ids):
    """One positive int64 for the largest value and its lowest id; above all if there is NaN."""
    order = tl.where(values != values, _NAN_ORDER, order_of(values)).to(tl.int64)
    return tl.max(((order + 2147483648) << 31) | (0x7FFFFFFF - ids).to(tl.int64), axis=0)


@triton.jit
def key_order(key):
    return ((key >> 31) - 2147483648).to(tl.int32)


@triton.jit
def key_token(key):
    """The id of a key; -1 for NaN."""
    token = (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)
    return tl.where(key_order(key) == _NAN_ORDER, -1, token)


@triton.jit
def per_unit(temperature):
    """1 / temperature, finite for the smallest ones: 0 times it must stay 0."""
    return tl.minimum(1.0 / temperature, 1e300)


@triton.jit
def scores_of(values, top, factor):
    """(logit - top) / temperature in float64; -inf for banned ids."""
    distance = values.to(tl.float64) - top.to(tl.float64)
    return tl.where(values >= LOWEST, distance * factor, float("-inf"))


@triton.jit
def noise_of(word):
    """Gumbel noise of a word, as spec.py defines it."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return -tl.log(-tl.log(uniform))


@triton.jit
def words_of(block, position, stream, seed_low, seed_high):
    """The four Philox words of each block of four ids."""
    zero = block.to(tl.uint32) * 0
    return tl.philox_impl(
        block.to(tl.uint32),
        zero + position.to(tl.uint32, bitcast=True),
        zero + stream.to(tl.uint32, bitcast=True),
        zero,
        seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
    )


@triton.jit
def best_draw(values, ids):
    """(largest value, its lowest id)."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, NO_ID), axis=0)


@triton.jit
def word_of(token, position, stream, seed_low, seed_high):
    """The Philox word of each id."""
    w0, w1, w2, w3 = words_of(token >> 2, position, stream, seed_low, seed_high)
    is_odd, is_high = (token & 1) > 0, (token & 2) > 0
    return tl.where(is_high, tl.where(is_odd, w3, w2), tl.where(is_odd, w1, w0))


@triton.jit
def exact_sum(a, b):
    """(the float64 nearest to a + b, what that leaves of it). As pairs they compare as the sums do.
    Neither may be a product: multiplied and added in one, it would be another number."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def best_sum(totals, rests, ids):
    """The largest of `exact_sum`s and its lowest id; an id without a sum has -inf and 0."""
    total = tl.max(totals, axis=0)
    rest = tl.max(tl.where(totals == total, rests, float("-inf")), axis=0)
    is_best = (totals == total) & (rests == rest)
    return total, rest, tl.min(tl.where(is_best, ids, NO_ID), axis=0)


@triton.jit
def chunk_words(begin, position, stream, seed_low, seed_high, COUNT: tl.constexpr):
    """The words of ids begin ... begin + COUNT - 1; both are multiples of four."""
    blocks = begin // 4 + tl.arange(0, COUNT // 4)
    w0, w1, w2, w3 = words_of(blocks, position, stream, seed_low, seed_high)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COUNT])


@triton.jit
def rough_noise(word):
    """The noise of a word in float32; 1 - u is formed apart, because most winners are near it."""
    rest = ((4294967295 - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near_one = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -tl.log(tl.where(rest < 0.015625, near_one, -tl.log(uniform)))


@triton.jit
def exact_draw(
    rough, ids, source, top, factor, position, stream, seed_low, seed_high, best, best_id
):
    """(largest score + noise, its lowest id) of the `ids` and of a draw that is already known.

    `rough` holds float32 draws, -inf for ids that do not take part. Ids are looked at exactly in
    the order of their rough draws, until no other can win: seldom more than one.
    """
    key = best_key(rough, ids)
    rough_best = value_of(key_order(key))
    while (rough_best >= LOWEST) & (rough_best.to(tl.float64) >= best - _ROUGH_MARGIN):
        token = key_token(key)
        word = word_of(token, position, stream, seed_low, seed_high)
        drawn = scores_of(tl.load(source + token), top, factor) + noise_of(word)
        is_better = (drawn > best) | ((drawn == best) & (token < best_id))
        best_id = tl.where(is_better, token, best_id)
        best = tl.where(is_better, drawn, best)
        rough = tl.where(ids == token, float("-inf"), rough)
        key = best_key(rough, ids)
        rough_best = value_of(key_order(key))
    return best, best_id


@triton.jit
def plain_draw(
    rough, first_id, source, factor, position, stream, seed_low, seed_high, COUNT: tl.constexpr
):
    """(total, rest, id) of the best draw of a row without filters: the largest logit / temperature
    + noise, as an `exact_sum`. So no draw depends on the ids it is compared with first: chunks and
    ranks may divide a vocabulary as they like.

    rough: float32 draws of the ids first_id ... first_id + COUNT - 1 up to a constant, -inf for
    those that do not take part. All that may be the best are looked at: seldom more than one.
    """
    places = tl.arange(0, COUNT)
    best = tl.full([], float("-inf"), tl.float64)
    best_rest = tl.full([], 0.0, tl.float64)
    best_id = tl.full([], NO_ID, tl.int32)
    key = best_key(rough, places)
    rough_best = value_of(key_order(key))
    bound = rough_best - _ROUGH_MARGIN
    while (rough_best >= LOWEST) & (rough_best >= bound):
        place = key_token(key)
        token = first_id + place
        noise = noise_of(word_of(token, position, stream, seed_low, seed_high))
        # a product alone, which nothing is added to in the same operation
        scaled = tl.fma(tl.load(source + place).to(tl.float64), tl.minimum(factor, _MOST), 0.0)
        total, rest = exact_sum(scaled, noise)
        is_better = (total > best) | ((total == best) & (rest > best_rest))
        is_better = is_better | ((total == best) & (rest == best_rest) & (token < best_id))
        best_id = tl.where(is_better, token, best_id)
        best_rest = tl.where(is_better, rest, best_rest)
        best = tl.where(is_better, total, best)
        rough = tl.where(places == place, float("-inf"), rough)
        key = best_key(rough, places)
        rough_best = value_of(key_order(key))
    return best, best_rest, best_id
