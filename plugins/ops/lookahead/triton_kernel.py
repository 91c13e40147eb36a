"""Lookahead decoding of one request by one thread block; runtime/drafting/lookahead/ says the same
plainly."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llmctl.plugins.ops.lookahead import arrays

_HEAD: tl.constexpr = tl.constexpr(arrays.HEAD_WIDTH)
_WIDTH: tl.constexpr = tl.constexpr(arrays.WIDTH)
_LAST: tl.constexpr = tl.constexpr(arrays.LAST)
_GUESSES: tl.constexpr = tl.constexpr(arrays.GUESSES)
_END_ID: tl.constexpr = tl.constexpr(arrays.END_ID)
_FILLED: tl.constexpr = tl.constexpr(arrays.FILLED)
_POSITION: tl.constexpr = tl.constexpr(arrays.POSITION)
_ROUND: tl.constexpr = tl.constexpr(arrays.ROUND)
_ROW_WIDTH: tl.constexpr = tl.constexpr(arrays.ROW_WIDTH)
_SEEDS: tl.constexpr = tl.constexpr(arrays.NUM_SEEDS)
_ROWS: tl.constexpr = tl.constexpr(arrays.ROWS)
_COUNT: tl.constexpr = tl.constexpr(arrays.COUNT)
_NGRAMS: tl.constexpr = tl.constexpr(arrays.NGRAMS)


@triton.jit
def look_ahead(
    root,
    previous,
    committed,
    max_len,
    capacity,
    drafts,
    targets,
    counter,
    parents,
    counts,
    rows,
    slots,
    heads,
    windows,
    seeds,
    ends,
    texts,
    pools,
    draft_len,
    MAX_DRAFT_LEN: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    MAX_LAST: tl.constexpr,
    ROW_WIDTH: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_GUESSES: tl.constexpr,
    BLOCK_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (requests)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0)
    length = tl.load(committed + request)
    if length > 0:
        slot = tl.load(slots + request).to(tl.int64)
        head = heads + slot * _HEAD
        window = windows + slot * (MAX_LAST * MAX_WINDOW)
        text = texts + slot * (MAX_LAST + MAX_DRAFT_LEN + 1)
        pool = pools + slot * (_ROWS * ROW_WIDTH)
        own_seeds = seeds + slot * (_SEEDS + 1)
        own_ends = ends + slot * MAX_WINDOW
        own_drafts = drafts + request * MAX_DRAFT_LEN
        own_parents = parents + request * MAX_DRAFT_LEN

        width = tl.load(head + _WIDTH)
        last = tl.load(head + _LAST)
        guesses = tl.load(head + _GUESSES)
        filled = tl.load(head + _FILLED)
        round = tl.load(head + _ROUND)
        row_width = tl.load(head + _ROW_WIDTH)
        moved = length - 1 - tl.load(head + _POSITION)
        token = tl.load(root + request)
        finished = tl.load(counter)
        is_behind_drafts = (round >= 0) & (((round + 1) & 0x7FFFFFFF) == finished)
        drawn_here = targets + request * row_width

        # The n-grams of a full window, column by column.
        column = tl.arange(0, BLOCK_COLUMNS)
        end = tl.load(own_ends + column, mask=is_behind_drafts & (column < width), other=-1)
        is_full = filled == last
        drawn = tl.load(drawn_here + end, mask=end >= 0, other=0)
        behind = tl.arange(0, BLOCK_LAST)
        if is_behind_drafts & is_full:
            before = tl.load(text + last - 1)
            for own in range(0, width):
                is_drawn = tl.sum(((column == own) & (end >= 0)).to(tl.int32), axis=0) > 0
                if is_drawn:
                    new = tl.sum(tl.where(column == own, drawn, 0), axis=0)
                    first = before
                    if own > 0:
                        first = tl.load(window + own)
                    ngram = tl.load(
                        window + (behind + 1) * width + own, mask=behind < last - 1, other=0
                    )
                    ngram = tl.where(behind == last - 1, new, ngram)
                    _add(pool, first, ngram, guesses, last, ROW_WIDTH, BLOCK_GUESSES, BLOCK_LAST)

        # The window moves on: a level more, or the root alone has moved.
        cell = tl.arange(0, BLOCK_WINDOW)
        level = cell // width
        at = cell % width
        columns = moved
        above = level
        levels = filled
        if is_behind_drafts:
            if is_full:
                above = level + 1
                columns = moved - 1
            else:
                levels = filled + 1
        is_cell = level < levels
        source = at + columns
        is_inside = is_cell & (source < width)
        is_new = is_inside & (above == filled)
        value = tl.load(
            window + above * width + source, mask=is_inside & (above < filled), other=-1
        )
        new_end = tl.load(own_ends + source, mask=is_new, other=-1)
        new = tl.load(drawn_here + new_end, mask=is_new & (new_end >= 0), other=-1)
        new = tl.where(new == tl.load(head + _END_ID), -1, new)
        value = tl.where(is_new, new, value)
        hashed = ((length - 1 + level + at).to(tl.int64) * 2654435761 >> 16) & 0xFFFF
        seed = (hashed % tl.load(own_seeds)).to(tl.int32)
        value = tl.where(value < 0, tl.load(own_seeds + 1 + seed, mask=is_cell, other=0), value)
        tl.debug_barrier()  # all have read
        tl.store(window + cell, value, mask=is_cell)

        # The n-grams of the text that the last round has brought.
        if is_behind_drafts:
            node = tl.load(rows + request) - request * row_width
            lane = tl.arange(0, BLOCK_NODES)
            is_known = lane < row_width - 1
            parent = tl.load(own_parents + lane, mask=is_known, other=0)
            draft = tl.load(own_drafts + lane, mask=is_known, other=0)
            place = last + moved - 1
            tl.store(text + place, token)
            while (node > 0) & (place > last):
                place -= 1
                is_node = lane == node - 1
                tl.store(text + place, tl.sum(tl.where(is_node, draft, 0), axis=0))
                node = tl.minimum(tl.sum(tl.where(is_node, parent, 0), axis=0), node - 1)
            tl.debug_barrier()
            for own in range(0, moved):
                first = tl.load(text + own)
                ngram = tl.load(text + own + 1 + behind, mask=behind < last, other=0)
                if first >= 0:
                    _add(pool, first, ngram, guesses, last, ROW_WIDTH, BLOCK_GUESSES, BLOCK_LAST)
            tail = tl.load(text + moved + behind, mask=behind < last, other=-1)
            tl.debug_barrier()
            tl.store(text + behind, tail, mask=behind < last)
        elif (round >= 0) & (moved > 0):  # rounds without drafts: two tokens are known
            tail = tl.where(behind == last - 2, tl.load(previous + request), -1)
            tail = tl.where(behind == last - 1, token, tail)
            tl.store(text + behind, tail, mask=behind < last)
        tl.debug_barrier()  # window, text and pool are read again

        # The tree: guesses, the newest first, then the window column by column.
        most = tl.minimum(tl.load(max_len + request) - 1, tl.load(capacity + request)) - length
        own_most = tl.maximum(last - 1, 0) + (width - 1 + guesses) * last
        room = tl.maximum(tl.minimum(tl.minimum(draft_len, own_most), most), 0)
        lane = tl.arange(0, BLOCK_NODES)
        tokens = tl.full([BLOCK_NODES], -1, tl.int32)
        above_nodes = tl.full([BLOCK_NODES], -1, tl.int32)
        count = tl.zeros([], tl.int32)

        row = pool + (token % _ROWS).to(tl.int64) * ROW_WIDTH
        known = tl.where(tl.load(row) == token + 1, tl.load(row + _COUNT), 0)
        guess = tl.arange(0, BLOCK_GUESSES)[:, None]
        place = behind[None, :]
        offered = tl.load(
            row + _NGRAMS + guess * last + place, mask=(guess < known) & (place < last), other=0
        )
        for nth in range(0, known):
            node = tl.zeros([], tl.int32)
            for depth in range(0, last):
                is_here = (guess == known - 1 - nth) & (place == depth)
                wanted = tl.sum(tl.sum(tl.where(is_here, offered, 0), axis=1), axis=0)
                node, tokens, above_nodes, count = _grow(
                    node, wanted, tokens, above_nodes, count, room, lane
                )
        cells = tl.load(window + cell, mask=cell < levels * width, other=0)
        new_ends = tl.full([BLOCK_COLUMNS], -1, tl.int32)
        first = tl.zeros([], tl.int32)
        for own in range(0, width):
            if own > 0:
                wanted = tl.sum(tl.where(cell == own, cells, 0), axis=0)
                first, tokens, above_nodes, count = _grow(
                    first, wanted, tokens, above_nodes, count, room, lane
                )
            node = first
            for depth in range(1, levels):
                wanted = tl.sum(tl.where(cell == depth * width + own, cells, 0), axis=0)
                node, tokens, above_nodes, count = _grow(
                    node, wanted, tokens, above_nodes, count, room, lane
                )
            new_ends = tl.where(column == own, node, new_ends)

        tl.store(own_drafts + lane, tokens, mask=lane < count)
        tl.store(own_parents + lane, above_nodes, mask=lane < count)
        tl.store(counts + request, count)
        tl.store(own_ends + column, new_ends, mask=column < width)
        tl.store(head + _FILLED, levels)
        tl.store(head + _POSITION, length - 1)
        tl.store(head + _ROUND, finished)
        tl.store(head + _ROW_WIDTH, draft_len + 1)


@triton.jit
def _grow(parent, token, tokens, above, count, room, lane):
    """(the node of a token behind a parent or -1, the tree with it): see tree.py."""
    is_same = (tokens == token) & (above == parent) & (lane < count)
    found = tl.max(tl.where(is_same, lane + 1, 0), axis=0)
    is_added = (found == 0) & (parent >= 0) & (count < room)
    is_place = is_added & (lane == count)
    tokens = tl.where(is_place, token, tokens)
    above = tl.where(is_place, parent, above)
    count += is_added.to(tl.int32)
    node = tl.where(is_added, count, tl.where((found > 0) & (parent >= 0), found, -1))
    return node, tokens, above, count


@triton.jit
def _add(
    pool,
    token,
    ngram,
    most,
    last,
    ROW_WIDTH: tl.constexpr,
    BLOCK_GUESSES: tl.constexpr,
    BLOCK_LAST: tl.constexpr,
):
    """`ngram` [BLOCK_LAST], of which `last` tokens count, followed `token`: see pool.py."""
    if most > 0:
        row = pool + (token % _ROWS).to(tl.int64) * ROW_WIDTH
        nth = tl.arange(0, BLOCK_GUESSES)[:, None]
        place = tl.arange(0, BLOCK_LAST)[None, :]
        is_token = place < last
        count = tl.where(tl.load(row) == token + 1, tl.load(row + _COUNT), 0)
        at = row + _NGRAMS + nth * last + place
        known = tl.load(at, mask=is_token & (nth < count), other=0)
        later = tl.load(at + last, mask=is_token & (nth + 1 < count), other=0)
        is_other = is_token & (known != ngram[None, :])
        differs = tl.sum(is_other.to(tl.int32), axis=1)[:, None]
        is_same = (differs == 0) & (nth < count)
        found = tl.min(tl.min(tl.where(is_same, nth, BLOCK_GUESSES), axis=1), axis=0)
        is_found = found < BLOCK_GUESSES
        # Who makes room: it itself, else the oldest of a full row, else nobody.
        gone = tl.where(is_found, found, tl.where(count == most, 0, count))
        count = tl.where(is_found | (count == most), count, count + 1)
        value = tl.where(nth >= gone, later, known)
        value = tl.where(nth == count - 1, ngram[None, :], value)
        tl.debug_barrier()  # all have read
        tl.store(at, value, mask=is_token & (nth < count))
        tl.store(row, token + 1)
        tl.store(row + _COUNT, count)
        tl.debug_barrier()  # the next one may read this row
