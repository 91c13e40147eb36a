"""The steps that compute drafts: one level of every sequence's."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs, Trees
from llmctl.runtime.drafting.growth.growth import Growth
from llmctl.runtime.step import pack_next


def pack_level(
    growths: Items[Growth],
    roots: NDArray[np.int32],
    tables: NDArray[np.int32],
    tokens_per_block: int,
    *,
    takes_roots: bool,
) -> StepInputs:
    """The step that computes all frontiers, in order. roots [B]: the position of each sequence's
    root, whose key is there; tables [B, blocks]: their block tables. takes_roots: see StepRunner;
    `logit_rows` are the rows of the frontiers."""
    tokens = np.array([node.token for own in growths for node in own.frontier], np.int32)
    if all(own.is_chain for own in growths):
        depths = np.array([own.frontier[0].place for own in growths], np.int32)
        return pack_next(tokens, roots + depths, tables, tokens_per_block)
    found = [own.paths() for own in growths]
    if not takes_roots:
        return _pack_places(found, tokens, roots, tables, tokens_per_block)
    depths = np.array([len(path) for own in found for path in own], np.int32)
    counts = np.array([len(own) for own in found], np.int32)
    owners = np.repeat(np.arange(len(growths)), counts)
    paths = np.zeros((len(depths), int(depths.max()) + 1), np.int32)
    for row, path in enumerate(path for own in found for path in own):
        paths[row, 1 : 1 + len(path)] = path
    places = roots[owners] + paths[np.arange(len(depths)), depths]
    cu_q = _prefix_sums(counts)
    furthest = np.maximum.reduceat(paths.max(axis=1), cu_q[:-1])
    return StepInputs(
        token_ids=tokens,
        position_ids=roots[owners] + depths,
        cu_q=cu_q,
        kv_len=roots + furthest + np.int32(1),
        block_tables=tables,
        slot_mapping=_slots(tables, owners, places, tokens_per_block),
        logit_rows=np.arange(len(depths), dtype=np.int32),
        trees=Trees(cu_q[:-1].copy(), paths, roots),
    )


def rows_of(growth: Growth, *, takes_roots: bool) -> int:
    """Tokens of a growth in a step that has trees: of a chain, too."""
    if takes_roots:
        return len(growth.frontier)
    return 1 + max(node.place for node in growth.frontier)


def _pack_places(
    found: Items[list[list[int]]],
    tokens: NDArray[np.int32],
    roots: NDArray[np.int32],
    tables: NDArray[np.int32],
    tokens_per_block: int,
) -> StepInputs:
    """The step as one that verifies trees: token i of a sequence is that of place i, so that the
    root is its first. Those that earlier steps have stored are computed again and not stored; what
    they are matters to nobody but for their paths."""
    counts = np.array([1 + max(map(max, own)) for own in found], np.int32)
    cu_q = _prefix_sums(counts)
    owners = np.repeat(np.arange(len(found)), counts)
    places = np.arange(cu_q[-1], dtype=np.int32) - cu_q[owners]
    depths = np.minimum(places, 1)  # one that is on no path here follows the root
    width = max(len(path) for own in found for path in own)
    paths = np.zeros((len(places), 1 + width), np.int32)
    paths[:, 1] = places
    rows = []
    for first, own in zip(cu_q.tolist(), found, strict=False):
        for path in own:
            for depth, place in enumerate(path, 1):
                paths[first + place, 1 : 1 + depth] = path[:depth]
                depths[first + place] = depth
            rows.append(first + path[-1])
    token_ids, slots = np.zeros_like(places), np.full_like(places, -1)
    token_ids[rows] = tokens
    stored = _slots(tables, owners, roots[owners] + places, tokens_per_block)
    slots[rows] = stored[rows]
    return StepInputs(
        token_ids=token_ids,
        position_ids=roots[owners] + depths,
        cu_q=cu_q,
        kv_len=roots + counts,
        block_tables=tables,
        slot_mapping=slots,
        logit_rows=np.array(rows, np.int32),
        trees=Trees(cu_q[:-1].copy(), paths),
    )


def _prefix_sums(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))


def _slots(
    tables: NDArray[np.int32],
    owners: NDArray[np.intp],
    positions: NDArray[np.int32],
    tokens_per_block: int,
) -> NDArray[np.int32]:
    """Cache slots of positions, each of the sequence that owns it."""
    blocks, offsets = np.divmod(positions, np.int32(tokens_per_block))
    slots: NDArray[np.int32] = tables[owners, blocks] * np.int32(tokens_per_block) + offsets
    return slots
