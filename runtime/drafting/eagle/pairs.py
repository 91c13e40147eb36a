"""What an EAGLE head reads of committed tokens, and from which rows of the target's step.

Pair i is the feature of token i, which the target computed at position i, and token i + 1. It is of
position i, and its keys and values lie in the slot of token i. So the head's cache is as long as
the target's, and the last pair of a prompt's chunk has the first token of the next one:

    target's step    t0 t1 t2 | t3 t4 t5          pairs    (f0 t1) (f1 t2) (f2 t3) | (f3 t4) ...
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.growth.growth import Growth
from llmctl.runtime.drafting.hidden_rows import end_of
from llmctl.runtime.request import Batch, FinishReason, Sequence
from llmctl.runtime.step import Span, pack


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs [start, end) of one sequence. rows [end - start]: of the target's last step, in which
    their features are. wants_drafts: the last of them starts the next round."""

    sequence: Sequence
    start: int
    end: int
    rows: NDArray[np.int64]
    wants_drafts: bool


def committed_pairs(batch: Batch, drafts: Items[Drafts], accepted: Items[int]) -> list[Pairs]:
    """The pairs that a step with these drafts completed, once their tokens are committed. None of a
    sequence that was cancelled meanwhile, or whose earlier pairs are missing."""
    found: list[Pairs] = []
    row = 0
    for item in batch.context:
        _add(found, item.sequence, item.start, np.arange(row, row + item.num_tokens))
        row += item.num_tokens
    for item, own, count in zip(batch.generation, drafts, accepted, strict=True):
        sequence, root = item.sequence, item.start
        path = sequence.tokens[root + 1 : root + 1 + count]
        last = end_of(own, path)
        _add(found, sequence, root, row + np.array([0, *(1 + i for i in own.path_to(last))]))
        row += 1 + len(own.tokens)
    return found


def _add(found: list[Pairs], sequence: Sequence, start: int, rows: NDArray[np.int64]) -> None:
    """start: the position of the first row."""
    end = min(start + len(rows), sequence.kv_lens[0])
    if not sequence.block_table or sequence.kv_lens[DRAFT_GROUP] != start or end <= start:
        return
    is_running = sequence.finish_reason is FinishReason.NOT_FINISHED
    wants_drafts = end == len(sequence.tokens) - 1 and is_running
    found.append(Pairs(sequence, start, end, rows[: end - start], wants_drafts))


def pack_pairs(pairs: Items[Pairs], tokens_per_block: int) -> StepInputs:
    """The step that reads them; its rows are those that drafts are wanted of, in order."""
    spans = [Span(own.sequence, own.start, own.end, (), own.wants_drafts) for own in pairs]
    tokens = [token for own in pairs for token in own.sequence.tokens[own.start + 1 : own.end + 1]]
    return replace(pack(spans, tokens_per_block), token_ids=np.array(tokens, np.int32))


def roots(growths: Items[Growth]) -> NDArray[np.int32]:
    """Positions of the pairs that drafts follow: of each sequence's last."""
    return np.array([len(own.sequence.tokens) - 2 for own in growths], np.int32)
