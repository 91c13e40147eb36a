"""Argmax and draws from rows of logits: plugins/sampling/spec.py on the device.

A draw takes two kernels. `scan` reads the row in chunks, one thread block each: the largest logit
of the chunk and of each group of ids, and, for a row without filters, the best draw of the chunk.
`finish` has one thread block per row: it joins the chunks, and where filters decide which ids may
be drawn it reads the few groups that can hold them.

What is compared is float64 or integers, and every sum is of integers or in one order, so a row's
token depends on nothing but its logits and its request's parameters.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # banned ids lie below
_NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_NAN_ORDER: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order(values):
    """float32 -> int32 that compares as the numbers do; -0 equals 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    """The float32 of an `_order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_key(values, ids):
    """One positive int64 for the largest value and its lowest id; above all if there is NaN."""
    order = tl.where(values != values, _NAN_ORDER, _order(values)).to(tl.int64)
    return tl.max(((order + 2147483648) << 31) | (0x7FFFFFFF - ids).to(tl.int64), axis=0)


@triton.jit
def _key_order(key):
    return ((key >> 31) - 2147483648).to(tl.int32)


@triton.jit
def _key_token(key):
    """The id of a key; -1 for NaN."""
    token = (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)
    return tl.where(_key_order(key) == _NAN_ORDER, -1, token)


@triton.jit
def argmax(
    logits,
    out,
    keys,
    arrivals,
    stride,
    offset,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last thread block of a row to arrive stores the token and clears the row's scratch."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    first = logits + row.to(tl.int64) * VOCAB
    values = tl.load(first + ids, mask=ids < VOCAB, other=float("-inf"))
    tl.atomic_max(keys + row, _best_key(values, ids), sem="relaxed")
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        key = tl.atomic_xchg(keys + row, tl.zeros([], tl.int64), sem="relaxed")
        tl.store(arrivals + row, 0)
        tl.store(out + row * stride + offset, _key_token(key))


# ---- the draw ----


@triton.jit
def _per_unit(temperature):
    """1 / temperature, finite for the smallest ones: 0 times it must stay 0."""
    return tl.minimum(1.0 / temperature, 1e300)


@triton.jit
def _scores(values, top, factor):
    """(logit - top) / temperature in float64; -inf for banned ids."""
    distance = values.to(tl.float64) - top.to(tl.float64)
    return tl.where(values >= _LOWEST, distance * factor, float("-inf"))


@triton.jit
def _noise(word):
    """Gumbel noise of a word, as spec.py defines it."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return -tl.log(-tl.log(uniform))


@triton.jit
def _words(block, position, stream, seed_low, seed_high):
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
def _best_draw(values, ids):
    """(largest value, its lowest id)."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, _NO_ID), axis=0)


@triton.jit
def scan(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed_low,
    seed_high,
    stream,
    greedy,
    positions,
    chunk_keys,
    chunk_values,
    chunk_ids,
    group_tops,
    per_request,
    first,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, rows). chunk_values: sum of exp(score) or, unfiltered, the best score plus
    noise, where scores are relative to the chunk's own largest logit."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_GROUPS: tl.constexpr = (VOCAB + GROUP - 1) // GROUP
    chunk, row = tl.program_id(0), tl.program_id(1)
    source = logits + row.to(tl.int64) * VOCAB
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(source + ids, mask=ids < VOCAB, other=float("-inf"))
    key = _best_key(values, ids)
    place = row * tl.num_programs(0) + chunk
    tl.store(chunk_keys + place, key)

    request = row // per_request
    if tl.load(greedy + request) == 0:
        k = tl.load(top_k + request)
        has_top_k = (k > 0) & (k < VOCAB)
        has_top_p = tl.load(top_p + request) < 1
        is_filtered = has_top_k | has_top_p | (tl.load(min_p + request) > 0)
        factor = _per_unit(tl.load(temperature + request))
        if is_filtered:
            tops = tl.max(tl.reshape(values, [CHUNK // GROUP, GROUP]), axis=1)
            group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            to = group_tops + row.to(tl.int64) * NUM_GROUPS + group
            tl.store(to, tops, mask=group < NUM_GROUPS)
        top = _value(_key_order(key))
        begin = chunk * CHUNK
        if top >= _LOWEST:  # not for chunks of banned ids, nor for NaN
            if not is_filtered:
                position = tl.load(positions + request) + first + row % per_request
                low, high = tl.load(seed_low + request), tl.load(seed_high + request)
                which = tl.load(stream + request)
                best = tl.full([TILE], float("-inf"), tl.float64)
                best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
                for start in range(begin, begin + CHUNK, TILE):
                    here = start + tl.arange(0, TILE)
                    near = tl.load(source + here, mask=here < VOCAB, other=float("-inf"))
                    blocks = start // 4 + tl.arange(0, TILE // 4)
                    w0, w1, w2, w3 = _words(blocks, position, which, low, high)
                    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
                    noise = _noise(tl.reshape(words, [TILE]))
                    drawn = _scores(near, top, factor) + noise
                    best_id = tl.where(drawn > best, here, best_id)
                    best = tl.maximum(drawn, best)
                best_drawn, drawn_id = _best_draw(best, best_id)
                tl.store(chunk_values + place, best_drawn)
                tl.store(chunk_ids + place, drawn_id)
            elif has_top_p & (not has_top_k):
                mass = tl.full([], 0.0, tl.float64)
                for start in range(begin, begin + CHUNK, TILE):
                    here = start + tl.arange(0, TILE)
                    near = tl.load(source + here, mask=here < VOCAB, other=float("-inf"))
                    mass += tl.sum(tl.exp(_scores(near, top, factor)), axis=0)
                tl.store(chunk_values + place, mass)


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
            above += (_order(found) >= middle.to(tl.int32)).to(tl.int32)
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
            between = 0.5 * _value(low.to(tl.int32)) + 0.5 * _value(high.to(tl.int32))
            middle = tl.minimum(tl.maximum(_order(between).to(tl.int64), low + 1), high)
        above = tl.zeros([TILE], tl.int64)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            found = tl.load(values + place, mask=place < count, other=float("-inf"))
            mass = tl.load(masses + place, mask=place < count, other=0)
            above += tl.where(_order(found) >= middle.to(tl.int32), mass, 0)
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
                order = _order(found)
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
def _filtered(
    source,
    group_tops,
    groups,
    ids,
    values,
    masses,
    top,
    total,  # sum of exp(score) over the row, where top-p needs it
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
    lowest = _order(tl.full([], _LOWEST, tl.float32))
    least = tl.log(min_p)  # -inf without min-p

    # A bound below every logit that can survive, so that few are looked at.
    bound = tl.full([], _LOWEST, tl.float32)
    if has_top_k:
        if k <= NUM_GROUPS:  # k groups hold at least k logits as large as their k-th top
            group = tl.arange(0, BLOCK_GROUPS)
            tops = tl.load(group_tops + group, mask=group < NUM_GROUPS, other=float("-inf"))
            bound = _value(_kth_order(_order(tops), k, lowest, _order(top)))
    else:
        reach = least
        if has_top_p:  # ids below this share hold less than 1 - p together
            reach = tl.maximum(reach, tl.log((1 - p) * total / VOCAB))
        distance = -reach * temperature
        size = tl.abs(top.to(tl.float64))
        near = top.to(tl.float64) - distance - 1e-6 * (size + distance)
        bound = tl.where(near > _LOWEST, near, _LOWEST).to(tl.float32)
    count = _collect(
        source, group_tops, groups, ids, values, bound, VOCAB, GROUP, BLOCK_GROUPS, TILE
    )

    border = _order(bound)
    if has_top_k:
        border = _kth_candidate(values, count, k, border, _order(top), TILE)

    # Ids above `share` stay, and of those at `share` the first `num_ties`.
    share = tl.full([], -1.0, tl.float64)
    num_ties = tl.full([], 0, tl.int32)
    num_equal = tl.full([], 0, tl.int32)
    if has_top_p:
        sums = tl.zeros([TILE], tl.int64)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            found = tl.load(values + place, mask=place < count, other=float("-inf"))
            exponential = tl.exp(_scores(found, top, factor))
            exponential = tl.where(_order(found) >= border, exponential, 0.0)
            mass = (exponential * MASS_UNIT + 0.5).to(tl.int64)
            tl.store(masses + place, mass, mask=place < count)
            sums += mass
        tl.debug_barrier()
        if has_top_k:
            total = tl.sum(sums, axis=0).to(tl.float64) / MASS_UNIT
        wanted = tl.ceil((total - (1 - p) * total) * MASS_UNIT).to(tl.int64)
        last = _mass_order(values, masses, count, wanted, border, _order(top), TILE)
        share = tl.exp(_scores(_value(last), top, factor))
        above = tl.zeros([TILE], tl.int64)
        equal = tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE):  # the search has used up the lists: logits by id
            place = start + tl.arange(0, TILE)
            token = tl.load(ids + place, mask=place < count, other=0)
            found = tl.load(source + token, mask=place < count, other=float("-inf"))
            exponential = tl.exp(_scores(found, top, factor))
            mass = (exponential * MASS_UNIT + 0.5).to(tl.int64)
            inside = (place < count) & (_order(found) >= border)
            above += tl.where((exponential > share) & inside, mass, 0)
            equal += ((exponential == share) & inside).to(tl.int32)
        num_equal = tl.sum(equal, axis=0)
        each = tl.maximum((share * MASS_UNIT + 0.5).to(tl.int64), 1)
        ties = (wanted - tl.sum(above, axis=0) + each - 1) // each
        num_ties = tl.minimum(tl.maximum(ties, 1), VOCAB).to(tl.int32)

    best = tl.full([TILE], float("-inf"), tl.float64)
    best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        token = tl.load(ids + place, mask=place < count, other=0)
        found = tl.load(source + token, mask=place < count, other=float("-inf"))
        scores = _scores(found, top, factor)
        stays = (place < count) & (_order(found) >= border) & (scores >= least)
        if has_top_p:
            exponential = tl.exp(scores)
            stays = stays & (exponential >= share)
            if num_equal > num_ties:  # rare: several at the border, and not all of them stay
                at_border = (_order(found) >= border) & (exponential == share) & (place < count)
                ties = at_border.to(tl.int32)
                rank = ties_before + tl.cumsum(ties, axis=0)
                stays = stays & ((exponential > share) | (rank <= num_ties))
                ties_before += tl.sum(ties, axis=0)
        w0, w1, w2, w3 = _words(token >> 2, position, stream, seed_low, seed_high)
        is_odd, is_high = (token & 1) > 0, (token & 2) > 0
        word = tl.where(is_high, tl.where(is_odd, w3, w2), tl.where(is_odd, w1, w0))
        drawn = tl.where(stays, scores + _noise(word), float("-inf"))
        best_id = tl.where(drawn > best, token, best_id)
        best = tl.maximum(drawn, best)
    drawn, drawn_id = _best_draw(best, best_id)
    return drawn_id


@triton.jit
def finish(
    logits,
    out,
    temperature,
    top_k,
    top_p,
    min_p,
    seed_low,
    seed_high,
    stream,
    greedy,
    positions,
    chunk_keys,
    chunk_values,
    chunk_ids,
    group_tops,
    groups,
    ids,
    values,
    masses,
    per_request,
    first,
    stride,
    offset,
    rows,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    MASS_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every thread block has scratch for candidates and takes one row after another."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NUM_CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    NUM_GROUPS: tl.constexpr = (VOCAB + GROUP - 1) // GROUP
    slot = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    exists = chunk < NUM_CHUNKS
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        keys = tl.load(chunk_keys + row * NUM_CHUNKS + chunk, mask=exists, other=0)
        key = tl.max(keys, axis=0)
        token = _key_token(key)
        top = _value(_key_order(key))
        request = row // per_request
        wide_row = tl.cast(row, tl.int64)
        if (tl.load(greedy + request) == 0) & (top >= _LOWEST):
            warmth = tl.load(temperature + request)
            factor = _per_unit(warmth)
            k = tl.load(top_k + request)
            p = tl.load(top_p + request)
            least = tl.load(min_p + request)
            has_top_k = (k > 0) & (k < VOCAB)
            is_filtered = has_top_k | (p < 1) | (least > 0)
            # Chunks of banned ids have stored nothing.
            used = exists & (_value(_key_order(keys)) >= _LOWEST)
            apart = _scores(_value(_key_order(keys)), top, factor)
            stored = chunk_values + row * NUM_CHUNKS + chunk
            if is_filtered:
                total = tl.full([], 0.0, tl.float64)
                if (p < 1) & (not has_top_k):
                    mass = tl.load(stored, mask=used, other=0.0)
                    total = tl.sum(tl.where(used, mass * tl.exp(apart), 0.0), axis=0)
                token = _filtered(
                    logits + wide_row * VOCAB,
                    group_tops + wide_row * NUM_GROUPS,
                    groups + slot * NUM_GROUPS,
                    ids + slot * (NUM_GROUPS * GROUP),
                    values + slot * (NUM_GROUPS * GROUP),
                    masses + slot * (NUM_GROUPS * GROUP),
                    top,
                    total,
                    factor,
                    warmth,
                    k,
                    p,
                    least,
                    tl.load(positions + request) + first + row % per_request,
                    tl.load(stream + request),
                    tl.load(seed_low + request),
                    tl.load(seed_high + request),
                    VOCAB,
                    GROUP,
                    BLOCK_GROUPS,
                    TILE,
                    MASS_UNIT,
                )
            else:
                drawn = tl.load(stored, mask=used, other=0.0) + apart
                drawn_ids = tl.load(chunk_ids + row * NUM_CHUNKS + chunk, mask=used, other=0)
                best, token = _best_draw(tl.where(used, drawn, float("-inf")), drawn_ids)
        tl.store(out + row * stride + offset, token)
