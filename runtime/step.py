"""Packs slices and drafts into the integer arrays of one step."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.core.calls import StepInputs, Trees
from llmctl.plugins.ops.sampling.spec import Logits
from llmctl.runtime.kv_cache import Arrival, BlockCopy, Move
from llmctl.runtime.request import Sequence


class StepRunner(Protocol):
    """What the loop and a drafter need from an engine; `runtime.engines.engine.Engine` implements
    it."""

    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_draft_len: int
    tokens_per_block: int
    onboards_aside: bool  # copies from host memory may be in flight while steps run
    is_asynchronous: bool  # `run` returns before the step has been computed
    takes_trees: bool  # drafts may be trees
    # Attention of prompts alone has FP8 products, of so many tokens at a time (fp8_context.py); 0:
    # all tokens have the same products.
    context_group: int
    shares_logits: bool  # ranks have parts of each row: ask for best ids where they are enough

    def allocate_kv_cache(self, num_blocks: int) -> None: ...
    def allocate_host_blocks(self, num_blocks: int) -> None: ...

    def copy_blocks(self, copies: Items[BlockCopy]) -> Arrival | None:
        """Start copies in order, before the next step. Copies from host memory may complete after
        that step starts, but before any later copy; returns None if everything is complete."""

    def run(self, step: StepInputs) -> Logits: ...
    def compact(self, moves: Items[Items[Move]]) -> None:
        """Move keys and values of accepted paths, (from, to) slots of each request, before the next
        step. No move of a request overwrites what a later move of it reads."""


@dataclass(slots=True)
class Span:
    """tokens[start:end] of one sequence, then its drafts, in one packed step.

    With `needs_logits` the last committed token and every draft get a row of logits. With `parents`
    the drafts are a tree (`Drafts.parents`); then end = start + 1, the root. `context_end` is that
    of a sequence whose tokens the engine computes with FP8 products, else 0.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: Items[int] = ()
    needs_logits: bool = True
    parents: Items[int] | None = None
    context_end: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of logits this span gets."""
        return 1 + len(self.drafts) if self.needs_logits else 0


def pack(spans: Items[Span], tokens_per_block: int) -> StepInputs:
    """The step that runs `spans` in order. Each block table must cover its span."""
    parts: list[NDArray[np.int32]] = []  # token ids
    ids: list[int] = []  # behind them
    cu_q = [0]
    starts: list[int] = []
    logit_rows: list[int] = []
    num_tokens = 0
    for span in spans:
        sequence = span.sequence
        if span.end <= sequence.num_prompt_tokens:  # thousands of tokens, perhaps
            prompt = np.frombuffer(sequence.pack_prompt(), np.int32)
            parts += (np.array(ids, np.int32), prompt[span.start : span.end])
            ids = []
        else:
            ids += sequence.tokens[span.start : span.end]
        ids += span.drafts
        num_tokens += span.end - span.start + len(span.drafts)
        if span.needs_logits:
            logit_rows += range(num_tokens - 1 - len(span.drafts), num_tokens)
        starts.append(span.start)
        cu_q.append(num_tokens)
    parts.append(np.array(ids, np.int32))
    prefix = np.array(cu_q, np.int32)
    counts = prefix[1:] - prefix[:-1]
    first = np.array(starts, np.int32)
    tables = block_tables([span.sequence for span in spans])
    positions = np.arange(num_tokens, dtype=np.int32)
    if len(spans) == 1:
        positions += first[0]
        slots = slots_at(tables[0], positions, tokens_per_block)
    else:
        positions += np.repeat(first - prefix[:-1], counts)
        owners = np.repeat(np.arange(len(spans)), counts)
        blocks, offsets = np.divmod(positions, np.int32(tokens_per_block))
        slots = tables[owners, blocks] * np.int32(tokens_per_block) + offsets
    trees = None
    if any(span.parents for span in spans):
        assert all(span.end == span.start + 1 for span in spans if span.parents), "roots alone"
        trees = pack_trees([span.parents for span in spans], prefix, positions)
    ends = [span.context_end if span.start < span.context_end else 0 for span in spans]
    return StepInputs(
        token_ids=np.concatenate(parts),
        position_ids=positions,
        cu_q=prefix,
        kv_len=first + counts,
        block_tables=tables,
        slot_mapping=slots,
        logit_rows=np.array(logit_rows, np.int32),
        trees=trees,
        context_end=np.array(ends, np.int32) if any(ends) else None,
    )


def pack_trees(
    parents: Items[Items[int] | None], cu_q: NDArray[np.int32], position_ids: NDArray[np.int32]
) -> Trees:
    """The trees of a step, from the parents of each request's drafts (None: a chain). Sets the
    positions of tree tokens: the position of the root, which is already there, plus their depth."""
    starts = np.full(len(parents), -1, np.int32)
    tables: list[NDArray[np.int32]] = []
    num_rows = 0
    for index, drafts in enumerate(parents):
        if not drafts:
            continue
        paths, depths = find_paths(drafts)
        first = cu_q[index]
        position_ids[first : cu_q[index + 1]] = position_ids[first] + depths
        starts[index] = num_rows
        num_rows += len(paths)
        tables.append(paths)
    packed = np.zeros((num_rows, max(table.shape[1] for table in tables)), np.int32)
    row = 0
    for table in tables:
        packed[row : row + len(table), : table.shape[1]] = table
        row += len(table)
    return Trees(starts, packed)


def find_paths(parents: Items[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(paths [T + 1, longest], depths [T + 1]) of a root and the T drafts of a tree; `Trees` says
    what a path is, `Drafts` what parents are."""
    depths = np.zeros(1 + len(parents), np.int32)
    for draft, parent in enumerate(parents):
        depths[1 + draft] = depths[1 + parent] + 1
    paths = np.zeros((len(depths), int(depths.max()) + 1), np.int32)
    for token, parent in enumerate(parents, 1):
        depth = depths[token]
        paths[token, :depth] = paths[1 + parent, :depth]
        paths[token, depth] = token
    return paths, depths


def block_tables(sequences: Items[Sequence]) -> NDArray[np.int32]:
    """Block ids [len(sequences), longest table], 0 where a table is shorter."""
    return pack_tables([sequence.block_table for sequence in sequences])


def pack_tables(tables: Items[Items[int]]) -> NDArray[np.int32]:
    """The same for given tables."""
    if len(tables) == 1:
        return np.array(tables, np.int32)
    lens = np.fromiter(map(len, tables), np.int32, len(tables))
    width = int(lens.max(initial=0))
    packed = np.zeros((len(tables), width), np.int32)
    # One array for all rows: filling it row by row is too slow for a step of 256 requests. `struct`
    # reads Python's integers in half of numpy's time.
    flat = struct.pack(f"{lens.sum()}i", *chain.from_iterable(tables))
    packed[np.arange(width) < lens[:, None]] = np.frombuffer(flat, np.int32)
    return packed


def slots_at(
    table: NDArray[np.int32], positions: NDArray[np.int32], tokens_per_block: int
) -> NDArray[np.int32]:
    """Cache slots of one sequence's positions."""
    blocks, offsets = np.divmod(positions, np.int32(tokens_per_block))
    slots: NDArray[np.int32] = table[blocks] * np.int32(tokens_per_block) + offsets
    return slots


def slots_of(table: Items[int], moves: Items[Move], tokens_per_block: int) -> list[Move]:
    """Moves between positions of one sequence as moves between slots."""

    def slot(position: int) -> int:
        block, offset = divmod(position, tokens_per_block)
        return table[block] * tokens_per_block + offset

    return [(slot(source), slot(target)) for source, target in moves]


def pack_rows(num_inputs: int, rows: Items[int]) -> StepInputs:
    """A step of a head that reads neither tokens nor a cache: it computes `rows` of its inputs,
    which have `num_inputs` rows."""
    none = np.zeros(num_inputs, np.int32)
    return StepInputs(
        token_ids=none,
        position_ids=none,
        cu_q=np.array([0, num_inputs], np.int32),
        kv_len=np.ones(1, np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        slot_mapping=none - np.int32(1),
        logit_rows=np.array(rows, np.int32),
    )


def pack_continued(tokens: NDArray[np.int32], rows: NDArray[np.int32]) -> StepInputs:
    """A step of a recurrent head: it reads `tokens` [N], each behind the row of its inputs that
    `rows` [N] names."""
    count = len(tokens)
    return replace(pack_rows(count, ()), token_ids=tokens, logit_rows=rows)


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
