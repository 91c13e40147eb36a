"""From slices and drafts to the packed integers of one step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.kv_cache import Arrival, BlockCopy
from llmctl.runtime.request import Sequence


class StepRunner(Protocol):
    """What the loop and a drafter need of an engine; `runtime.engines.engine.Engine` is one."""

    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_draft_len: int
    tokens_per_block: int
    onboards_aside: bool  # what comes from host memory may be under way while steps run
    is_asynchronous: bool  # `run` returns before the step has been computed

    def allocate_kv_cache(self, num_blocks: int) -> None: ...
    def allocate_host_blocks(self, num_blocks: int) -> None: ...

    def copy_blocks(self, copies: Items[BlockCopy]) -> Arrival | None:
        """Start copies in order, before the next step. What comes from host memory may be late,
        for that step but not for a later copy; None: everything is there."""

    def run(self, step: StepInputs) -> Logits: ...


@dataclass(slots=True)
class Span:
    """tokens[start:end] of one sequence, then its drafts, in one packed step.

    With `needs_logits` the last committed token and every draft get a row of logits.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: Items[int] = ()
    needs_logits: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of logits this span gets."""
        return 1 + len(self.drafts) if self.needs_logits else 0


def pack(spans: Items[Span], tokens_per_block: int) -> StepInputs:
    """The step that runs `spans` in order. Each block table must cover its span."""
    token_ids: list[int] = []
    cu_q = [0]
    starts: list[int] = []
    logit_rows: list[int] = []
    for span in spans:
        token_ids += span.sequence.tokens[span.start : span.end]
        if span.needs_logits:
            root = len(token_ids) - 1
            logit_rows += range(root, root + 1 + len(span.drafts))
        token_ids += span.drafts
        starts.append(span.start)
        cu_q.append(len(token_ids))
    prefix = np.array(cu_q, np.int32)
    counts = prefix[1:] - prefix[:-1]
    first = np.array(starts, np.int32)
    tables = block_tables([span.sequence for span in spans])
    positions = np.arange(len(token_ids), dtype=np.int32)
    if len(spans) == 1:
        positions += first[0]
        slots = slots_at(tables[0], positions, tokens_per_block)
    else:
        positions += np.repeat(first - prefix[:-1], counts)
        owners = np.repeat(np.arange(len(spans)), counts)
        blocks, offsets = np.divmod(positions, np.int32(tokens_per_block))
        slots = tables[owners, blocks] * np.int32(tokens_per_block) + offsets
    return StepInputs(
        token_ids=np.array(token_ids, np.int32),
        position_ids=positions,
        cu_q=prefix,
        kv_len=first + counts,
        block_tables=tables,
        slot_mapping=slots,
        logit_rows=np.array(logit_rows, np.int32),
    )


def block_tables(sequences: Items[Sequence]) -> NDArray[np.int32]:
    """Block ids [len(sequences), longest table], 0 where a table is shorter."""
    return pack_tables([sequence.block_table for sequence in sequences])


def pack_tables(tables: Items[Items[int]]) -> NDArray[np.int32]:
    """The same for tables as they are."""
    if len(tables) == 1:
        return np.array(tables, np.int32)
    lens = np.fromiter(map(len, tables), np.int32, len(tables))
    width = int(lens.max(initial=0))
    packed = np.zeros((len(tables), width), np.int32)
    # One array for all: a row at a time costs more than a step of 256 requests can spare.
    flat = np.fromiter(chain.from_iterable(tables), np.int32, int(lens.sum()))
    packed[np.arange(width) < lens[:, None]] = flat
    return packed


def slots_at(
    table: NDArray[np.int32], positions: NDArray[np.int32], tokens_per_block: int
) -> NDArray[np.int32]:
    """Cache slots of one sequence's positions."""
    blocks, offsets = np.divmod(positions, np.int32(tokens_per_block))
    slots: NDArray[np.int32] = table[blocks] * np.int32(tokens_per_block) + offsets
    return slots


def pack_next(
    tokens: NDArray[np.int32],
    positions: NDArray[np.int32],
    tables: NDArray[np.int32],
    tokens_per_block: int,
) -> StepInputs:
    """A step of one token per sequence: `tokens` [B] at `positions` [B], `tables` [B, blocks]."""
    batch = np.arange(len(tokens) + 1, dtype=np.int32)
    blocks, offsets = np.divmod(positions, np.int32(tokens_per_block))
    return StepInputs(
        token_ids=tokens,
        position_ids=positions,
        cu_q=batch,
        kv_len=positions + np.int32(1),
        block_tables=tables,
        slot_mapping=tables[batch[:-1], blocks] * np.int32(tokens_per_block) + offsets,
        logit_rows=batch[:-1],
    )
