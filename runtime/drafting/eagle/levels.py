"""The steps of a head behind its first: one level of the drafts of every sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from llmctl.plugins.core.calls import StepInputs, Trees
from llmctl.runtime.drafting.eagle.growth import Growth
from llmctl.runtime.step import block_tables, pack_next


def pack_level(growths: Items[Growth], tokens_per_block: int) -> StepInputs:
    """The step that computes all frontiers, in order. The root of each sequence's drafts is the
    pair of its last token: at the position before that."""
    roots = np.array([len(own.sequence.tokens) - 2 for own in growths], np.int32)
    tables = block_tables([own.sequence for own in growths])
    lines = [[node.line() for node in own.frontier] for own in growths]
    depths = np.array([len(line) for own in lines for line in own], np.int32)
    tokens = np.array([line[-1].token for own in lines for line in own], np.int32)
    if not any(own.num_offers for own in growths):
        return pack_next(tokens, roots + depths, tables, tokens_per_block)
    counts = np.array([len(own) for own in lines], np.int32)
    owners = np.repeat(np.arange(len(growths)), counts)
    paths = np.zeros((len(depths), int(depths.max()) + 1), np.int32)
    for row, line in enumerate(line for own in lines for line in own):
        paths[row, 1 : 1 + len(line)] = [node.place for node in line]
    places = roots[owners] + paths[np.arange(len(depths)), depths]
    blocks, offsets = np.divmod(places, np.int32(tokens_per_block))
    cu_q = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    furthest = np.maximum.reduceat(paths.max(axis=1), cu_q[:-1])
    return StepInputs(
        token_ids=tokens,
        position_ids=roots[owners] + depths,
        cu_q=cu_q,
        kv_len=roots + furthest + np.int32(1),
        block_tables=tables,
        slot_mapping=tables[owners, blocks] * np.int32(tokens_per_block) + offsets,
        logit_rows=np.arange(len(depths), dtype=np.int32),
        trees=Trees(cu_q[:-1].copy(), paths, roots),
    )
