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
) -> StepInputs:
    """The step that computes all frontiers, in order, a row for each node. roots [B]: the position
    of each sequence's root, whose key is there; tables [B, blocks]: their block tables."""
    tokens = np.array([node.token for own in growths for node in own.frontier], np.int32)
    if all(own.is_chain for own in growths):
        depths = np.array([own.frontier[0].place for own in growths], np.int32)
        return pack_next(tokens, roots + depths, tables, tokens_per_block)
    found = [own.paths() for own in growths]
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
