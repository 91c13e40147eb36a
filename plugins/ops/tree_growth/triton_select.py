"""Which drafts of a tree are kept, and which of a level are followed. `note` is scratch of a
request, rows of span + 1 numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_best(
    drafts,
    parents,
    scores,
    places,
    kinds,
    counts,
    frontier,
    children,
    drawn,
    ids,
    log_probs,
    rows_before,
    ranking,
    note,
    is_real,
    is_greedy,
    end,
    level,
    levels,
    draft_len,
    offered_by,
    num_offers,
    is_given,
    span,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The draft_len best of the drafts so far and of what the rows of those that were followed
    offer, in the order of offers; of a tree that is given, its nodes. Requests that are not greedy
    have a chain of what they drew.

    Notes: 1 ranks: the drafts that may be followed, by rank; 2 used: places that are taken; 4 from
    which row each draft comes.
    """
    renumbered, ranked, used = note, note + (span + 1), note + 2 * (span + 1)
    came_from = note + 4 * (span + 1)
    item = tl.arange(0, BLOCK)
    known = tl.load(counts)
    known = tl.where(level > 0, known, 0)
    total = known + offered_by * num_offers
    is_known, in_range = item < known, item < total
    is_offer = in_range & (item >= known) & is_real
    slot, nth = (item - known) // num_offers, (item - known) % num_offers
    parent = tl.load(frontier + slot, mask=is_offer & (level > 0), other=0)
    is_offer = is_offer & ((level == 0) | (parent > 0))
    offer = slot * num_offers + nth
    value = tl.load(log_probs + offer, mask=is_offer, other=float("-inf"))
    from_tree = is_given & is_greedy
    above = tl.load(kinds + parent - 1, mask=is_offer & (parent > 0), other=0)
    kind = tl.load(children + above * num_offers + nth, mask=is_offer & from_tree, other=0)
    is_taken = (kind > 0) & (kind <= draft_len)
    value = tl.where(from_tree & (is_taken == 0), float("-inf"), value)
    value = tl.where(from_tree & (value > float("-inf")), 0.0, value)
    is_drawn = (slot == 0) & (nth == 0)
    value = tl.where(is_greedy, value, tl.where(is_offer & is_drawn, 0.0, float("-inf")))
    token = tl.load(ids + offer, mask=is_offer & is_greedy, other=0)
    token += tl.load(drawn + item * 0, mask=is_offer & is_drawn & (is_greedy == 0), other=0)
    row = tl.load(rows_before + slot, mask=is_offer, other=0)
    before = tl.load(scores + parent - 1, mask=is_offer & (parent > 0), other=0.0)
    score = tl.load(scores + item, mask=is_known, other=0.0)
    score += tl.where(is_known, 0.0, before + tl.minimum(value, 0.0).to(tl.float64))
    exists = is_known | (is_offer & (value > float("-inf")))
    score = tl.where(exists, score, float("-inf"))
    token += tl.load(drafts + item, mask=is_known, other=0)
    up = parent + tl.load(parents + item, mask=is_known, other=0)
    place = tl.load(places + item, mask=is_known, other=0)
    kind += tl.load(kinds + item, mask=is_known, other=0)

    tl.store(ranking + item, score, mask=in_range)
    tl.debug_barrier()
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, TILE):
        other = start + tl.arange(0, TILE)
        theirs = tl.load(ranking + other, mask=other < total, other=float("-inf"))
        is_better = theirs[None, :] > score[:, None]
        is_before = (theirs[None, :] == score[:, None]) & (other[None, :] < item[:, None])
        rank += tl.sum((is_better | is_before).to(tl.int32), axis=1)
    is_kept = exists & (rank < draft_len)
    node = tl.cumsum(is_kept.to(tl.int32), 0)
    tl.store(renumbered + item, tl.where(is_kept, node, 0), mask=in_range)
    tl.store(ranked + item, 0, mask=item <= draft_len)
    tl.store(used + item, 0, mask=item <= draft_len)
    tl.debug_barrier()
    up = tl.load(renumbered + up - 1, mask=is_kept & (up > 0), other=0)
    tl.store(drafts + node - 1, token, mask=is_kept)
    tl.store(parents + node - 1, up, mask=is_kept)
    tl.store(scores + node - 1, score, mask=is_kept)
    tl.store(kinds + node - 1, kind, mask=is_kept)
    tl.store(counts, tl.sum(is_kept.to(tl.int32), 0))
    # The last of the best has no child among them, so its place is free for others.
    place = tl.where(rank < draft_len - 1, place, 0)
    tl.store(places + node - 1, place, mask=is_kept)
    tl.store(used + place, 1, mask=is_kept & (place > 0))
    is_last = (level + 1 >= levels) | (rank >= draft_len - 1)
    may_grow = is_kept & (is_known == 0) & (token != end) & (is_last == 0)
    if is_given:
        num_children = tl.zeros([BLOCK], tl.int32)
        for its in range(0, num_offers):
            child = tl.load(children + kind * num_offers + its, mask=may_grow & is_greedy, other=0)
            num_children += ((child > 0) & (child <= draft_len)).to(tl.int32)
        may_grow = may_grow & ((num_children > 0) | (is_greedy == 0))
    tl.store(ranked + rank, node, mask=may_grow)
    tl.store(came_from + node, row, mask=may_grow)
    tl.debug_barrier()


@triton.jit
def follow(
    places,
    counts,
    frontier,
    note,
    level,
    last,  # place that there is
    draft_len,
    width,
    span,
    BLOCK_NODES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """The best of those that may be followed, as many as `width` and the free places: each takes
    the lowest that is not before its depth."""
    ranked, used = note + (span + 1), note + 2 * (span + 1)
    free = note + 3 * (span + 1)
    entry = tl.arange(0, BLOCK_NODES)
    in_range = entry <= draft_len
    node = tl.load(ranked + entry, mask=in_range, other=0)
    is_used = tl.load(used + entry, mask=in_range, other=1)
    may_grow = (node > 0).to(tl.int32)
    nth = tl.cumsum(may_grow, 0) - may_grow
    is_free = ((entry > level) & (entry <= last) & (is_used == 0)).to(tl.int32)
    tl.store(free + tl.cumsum(is_free, 0) - 1, entry, mask=is_free > 0)
    count = tl.minimum(tl.minimum(tl.sum(may_grow, 0), tl.sum(is_free, 0)), width)
    tl.debug_barrier()
    is_followed = (node > 0) & (nth < count)
    place = tl.load(free + nth, mask=is_followed, other=0)
    tl.store(places + node - 1, place, mask=is_followed)
    tl.store(frontier + nth, node, mask=is_followed)
    slot = tl.arange(0, BLOCK_WIDTH)
    tl.store(frontier + slot, 0, mask=(slot >= count) & (slot < width))
    tl.debug_barrier()
