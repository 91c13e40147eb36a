"""A device's step in terms that the CPU takes: tokens of a request for which it has no block.

A device stores them nowhere (slot -1), and nobody reads what comes of them; the CPU refuses such a
slot, and positions at or above kv_len. So they get positions behind the others, and any block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def positions_in_order(positions: Ints, cu_q: Ints, kv_len: Ints) -> tuple[Ints, Ints]:
    """Positions [tokens] and kv_len [requests] with those at or above kv_len behind the last entry,
    in order, whatever they were held to."""
    found, entries = positions.copy(), kv_len.copy()
    for request, held in enumerate(kv_len):
        own = found[cu_q[request] : cu_q[request + 1]]
        is_beyond = own >= held
        own[is_beyond] = held + np.arange(is_beyond.sum())
        entries[request] += is_beyond.sum()
    return found, entries


def tables_for(tables: Ints, held: Ints, entries: Ints, size: int) -> Ints:
    """Block tables [requests, blocks] of so many entries, of which a request has those it held."""
    missing = -(-int(entries.max(initial=0)) // size) - tables.shape[1]
    wide = np.pad(tables, ((0, 0), (0, max(missing, 0))))
    return np.where(np.arange(wide.shape[1]) * size < held[:, None], wide, 0).astype(np.int32)


def slots_elsewhere(
    slots: Ints, tables: Ints, num_blocks: int, size: int
) -> tuple[Ints, list[int]]:
    """The slots with others, of blocks that the step does not use, for tokens that a device stores
    nowhere; and these blocks."""
    nowhere = np.flatnonzero(slots < 0)
    if not len(nowhere):
        return slots, []
    used = set(tables.ravel().tolist())
    free = [block for block in range(num_blocks) if block not in used]
    borrowed = free[: -(-len(nowhere) // size)]
    found = slots.copy()
    places = (np.array(borrowed)[:, None] * size + np.arange(size)).ravel()
    found[nowhere] = places[: len(nowhere)]
    return found, borrowed
