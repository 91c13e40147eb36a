"""Filters of one row by one thread block, from the groups of ids that can hold survivors.

Exact for every row, and fast where few ids can survive: always with top-k, and with top-p or min-p
where the distribution is peaked. triton_wide.py is for the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.plugins.ops.sampling.triton_values import (
    LOWEST,
    best_draw,
    noise_of,
    order_of,
    scores_of,
    value_of,
    word_of,
)


@triton.jit
def mass_of(exponential, MASS_UNIT: tl.constexpr):
    """exp(score) <= 1 as an integer: sums of them do not depend on the order."""
    return (exponential * MASS_UNIT + 0.5).to(tl.int64)


@triton.jit
def wanted_mass(total, p, MASS_UNIT: tl.constexpr):
    """The mass that the ids inside top-p must hold, of a row whose sum of exp(score) is `total`."""
    return tl.maximum(tl.ceil((total - (1 - p) * total) * MASS_UNIT).to(tl.int64), 1)


@triton.jit
def ties_within(wanted, share, VOCAB: tl.constexpr, MASS_UNIT: tl.constexpr):
    """How many ids of exp(score) `share` it takes to hold the mass `wanted`; at least one."""
    each = tl.maximum(mass_of(share, MASS_UNIT), 1)
    ties = (wanted + each - 1) // each
    return tl.minimum(tl.maximum(ties, 1), VOCAB).to(tl.int32)


@triton.jit
def _row_mass(source, top, factor, VOCAB: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr):
    """The sum of exp(score) over a row."""
    sums = tl.zeros([TILE], tl.int64)
    for start in range(0, VOCAB, TILE):
        here = start + tl.arange(0, TILE)
        found = tl.load(source + here, mask=here < VOCAB, other=float("-inf"))
        sums += mass_of(tl.exp(scores_of(found, top, factor)), UNIT)
    return tl.sum(sums, axis=0).to(tl.float64) / UNIT


@triton.jit
def _kth_order(orders, wanted, low, high):
    """An order whose set of entries at or above it is that of the `wanted` largest and those that
    tie with the last of them. At least `wanted` of `orders` lie in [low, high]."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = high - (high - low) // 2
        count = tl.sum((orders >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count > wanted, high, tl.where(count == wanted, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
def _kth_candidate(values, count, wanted, low, high, TILE: tl.constexpr):
    """The same over `count` stored logits."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = high - (high - low) // 2
        above = tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            found = tl.load(values + place, mask=place < count, other=float("-inf"))
            above += (order_of(found) >= middle.to(tl.int32)).to(tl.int32)
        total = tl.sum(above, axis=0)
        low = tl.where(total >= wanted, middle, low)
        high = tl.where(total > wanted, high, tl.where(total == wanted, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
def _mass_order(values, masses, count, wanted, low, high, TILE: tl.constexpr):
    """The largest order such that the candidates at or above it hold the mass `wanted`; `low` if
    all together hold less. Many candidates become few on the way: those that no longer decide are
    removed from both lists."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        is_many = count > 2 * TILE
        middle = high - (high - low) // 2
        if is_many:  # halves of the range of values split logits more evenly than those of orders
            between = 0.5 * value_of(low.to(tl.int32)) + 0.5 * value_of(high.to(tl.int32))
            middle = tl.minimum(tl.maximum(order_of(between).to(tl.int64), low + 1), high)
        above = tl.zeros([TILE], tl.int64)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            found = tl.load(values + place, mask=place < count, other=float("-inf"))
            mass = tl.load(masses + place, mask=place < count, other=0)
            above += tl.where(order_of(found) >= middle.to(tl.int32), mass, 0)
        is_enough = tl.sum(above, axis=0) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
        if is_many:
            kept = tl.full([], 0, tl.int32)
            over = tl.zeros([TILE], tl.int64)
            for start in range(0, count, TILE):
                place = start + tl.arange(0, TILE)
                found = tl.load(values + place, mask=place < count, other=float("-inf"))
                mass = tl.load(masses + place, mask=place < count, other=0)
                order = order_of(found)
                over += tl.where(order > high.to(tl.int32), mass, 0)
                stays = (place < count) & (order > low.to(tl.int32)) & (order <= high.to(tl.int32))
                to = kept + tl.cumsum(stays.to(tl.int32), axis=0) - 1
                tl.debug_barrier()  # what is overwritten below has been read
                tl.store(values + to, found, mask=stays)
                tl.store(masses + to, mass, mask=stays)
                kept += tl.sum(stays.to(tl.int32), axis=0)
            tl.debug_barrier()
            wanted -= tl.sum(over, axis=0)
            count = kept
    return low.to(tl.int32)


@triton.jit
def _collect(
    source,
    group_tops,
    groups,
    ids,
    values,
    bound,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores the ids, ascending, whose logit is at least `bound`, and the logits; their number."""
    NUM_GROUPS: tl.constexpr = (VOCAB + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK_GROUPS)
    tops = tl.load(group_tops + group, mask=group < NUM_GROUPS, other=float("-inf"))
    is_near = ((tops >= bound) & (group < NUM_GROUPS)).to(tl.int32)
    tl.store(groups + tl.cumsum(is_near, axis=0) - 1, group, mask=is_near > 0)
    num_near = tl.sum(is_near, axis=0)
    tl.debug_barrier()
    count = tl.full([], 0, tl.int32)
    for start in range(0, num_near, TILE // GROUP):
        index = start + tl.arange(0, TILE) // GROUP
        which = tl.load(groups + index, mask=index < num_near, other=0)
        token = which * GROUP + tl.arange(0, TILE) % GROUP
        exists = (index < num_near) & (token < VOCAB)
        found = tl.load(source + token, mask=exists, other=float("-inf"))
        taken = (exists & (found >= bound)).to(tl.int32)
        place = count + tl.cumsum(taken, axis=0) - 1
        tl.store(ids + place, token, mask=taken > 0)
        tl.store(values + place, found, mask=taken > 0)
        count += tl.sum(taken, axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def filtered(
    source,
    group_tops,
    groups,
    ids,
    values,
    masses,
    top,
    factor,
    temperature,
    k,
    p,
    min_p,
    position,
    stream,
    seed_low,
    seed_high,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    MASS_UNIT: tl.constexpr,
):
    """The token of a row with filters."""
    NUM_GROUPS: tl.constexpr = (VOCAB + GROUP - 1) // GROUP
    has_top_k = (k > 0) & (k < VOCAB)
    has_top_p = p < 1
    lowest = order_of(tl.full([], LOWEST, tl.float32))
    least = tl.log(min_p)  # -inf without min-p
    total = tl.full([], 0.0, tl.float64)
    if has_top_p & (not has_top_k):
        total = _row_mass(source, top, factor, VOCAB, TILE, MASS_UNIT)

    # A bound below every logit that can survive, so that few are looked at.
    bound = tl.full([], LOWEST, tl.float32)
    if has_top_k:
        if k <= NUM_GROUPS:  # k groups hold at least k logits as large as their k-th top
            group = tl.arange(0, BLOCK_GROUPS)
            tops = tl.load(group_tops + group, mask=group < NUM_GROUPS, other=float("-inf"))
            bound = value_of(_kth_order(order_of(tops), k, lowest, order_of(top)))
    else:
        reach = least
        if has_top_p:  # ids below this share hold less than 1 - p together
            reach = tl.maximum(reach, tl.log((1 - p) * total / VOCAB))
        distance = -reach * temperature
        size = tl.abs(top.to(tl.float64))
        near = top.to(tl.float64) - distance - 1e-6 * (size + distance)
        bound = tl.where(near > LOWEST, near, LOWEST).to(tl.float32)
    count = _collect(
        source, group_tops, groups, ids, values, bound, VOCAB, GROUP, BLOCK_GROUPS, TILE
    )

    border = order_of(bound)
    if has_top_k:
        border = _kth_candidate(values, count, k, border, order_of(top), TILE)

    # Ids above `share` stay, and of those at `share` the first `num_ties`.
    share = tl.full([], -1.0, tl.float64)
    num_ties = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    if has_top_p:
        sums = tl.zeros([TILE], tl.int64)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            found = tl.load(values + place, mask=place < count, other=float("-inf"))
            exponential = tl.exp(scores_of(found, top, factor))
            exponential = tl.where(order_of(found) >= border, exponential, 0.0)
            mass = mass_of(exponential, MASS_UNIT)
            tl.store(masses + place, mass, mask=place < count)
            sums += mass
        tl.debug_barrier()
        if has_top_k:
            total = tl.sum(sums, axis=0).to(tl.float64) / MASS_UNIT
        wanted = wanted_mass(total, p, MASS_UNIT)
        last = _mass_order(values, masses, count, wanted, border, order_of(top), TILE)
        share = tl.exp(scores_of(value_of(last), top, factor))
        above = tl.zeros([TILE], tl.int64)
        equal = tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE):  # the search has used up the lists: logits by id
            place = start + tl.arange(0, TILE)
            token = tl.load(ids + place, mask=place < count, other=0)
            found = tl.load(source + token, mask=place < count, other=float("-inf"))
            exponential = tl.exp(scores_of(found, top, factor))
            mass = mass_of(exponential, MASS_UNIT)
            inside = (place < count) & (order_of(found) >= border)
            above += tl.where((exponential > share) & inside, mass, 0)
            equal += ((exponential == share) & inside).to(tl.int32)
        num_equal = tl.sum(equal, axis=0)
        num_ties = ties_within(wanted - tl.sum(above, axis=0), share, VOCAB, MASS_UNIT)

    best = tl.full([TILE], float("-inf"), tl.float64)
    best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        token = tl.load(ids + place, mask=place < count, other=0)
        found = tl.load(source + token, mask=place < count, other=float("-inf"))
        scores = scores_of(found, top, factor)
        stays = (place < count) & (order_of(found) >= border) & (scores >= least)
        if has_top_p:
            exponential = tl.exp(scores)
            stays = stays & (exponential >= share)
            if num_equal > num_ties:  # rare: several at the border, and not all of them stay
                at_border = (order_of(found) >= border) & (exponential == share) & (place < count)
                ties = at_border.to(tl.int32)
                rank = ties_before + tl.cumsum(ties, axis=0)
                stays = stays & ((exponential > share) | (rank <= num_ties))
                ties_before += tl.sum(ties, axis=0)
        word = word_of(token, position, stream, seed_low, seed_high)
        drawn = tl.where(stays, scores + noise_of(word), float("-inf"))
        best_id = tl.where(drawn > best, token, best_id)
        best = tl.maximum(drawn, best)
    drawn, drawn_id = best_draw(best, best_id)
    return drawn_id
