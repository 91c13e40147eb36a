"""Uploads the request state of rounds from the host to the device.

Written when the sequences of a round change (`write_sequences`) and when their blocks do
(`write_tables`), on the stream of the rounds, so it takes effect after the rounds in flight.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence as Items
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import Plan
from llmctl.plugins.backends.cuda.queue import DeviceQueue, device_errors
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.tree_kernel import MOST_RANKS, num_chunks, num_keys
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.lookahead.arrays import LookaheadSizes, lookahead_bytes
from llmctl.plugins.ops.rank_offers import kernel as rank_offers
from llmctl.plugins.ops.sampling.kernel import has_filter, is_wide
from llmctl.plugins.ops.sampling.spec import MAX_TOP_K
from llmctl.plugins.ops.tree_growth.arrays import growth_bytes
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence

_WORD = 0xFFFFFFFF
_FORMATS = {torch.int32: "i", torch.float64: "d"}  # of `struct`


class Drawing(enum.Enum):
    """Which launches draw a round's tokens; a graph contains those it was captured with."""

    GREEDY = "greedy"
    PLAIN = "plain"  # sampled without filters, of logits that ranks have shares of
    NARROW = "narrow"  # sampled, and every request's filters leave few ids
    WIDE = "wide"


class RoundUpload:
    """Writes one RoundState and the block tables of the engines that share it. tables: further
    ones."""

    def __init__(
        self,
        state: RoundState,
        engines: Items[CudaEngine],
        queue: DeviceQueue,
        tables: Items[torch.Tensor] = (),
    ) -> None:
        self._state = state
        self._engines = engines
        self._tables = [*(engine.program.step.block_tables for engine in engines), *tables]
        self._queue = queue
        self._tokens_per_block = engines[0].tokens_per_block

    def write_sequences(self, sequences: Items[Sequence]) -> Drawing:
        """Upload each request's length and sampling parameters; the rest of the batch becomes
        padding.

        Returns which launches drawing takes; if all requests are greedy, the sampling arrays are
        unchanged.
        """
        state, arrays = self._state, self._state.sampling
        params = [sequence.request.sampling_config for sequence in sequences]
        lens = [len(sequence.tokens) for sequence in sequences]
        padding = [0] * (len(state.committed) - len(lens))
        written: list[tuple[torch.Tensor, list[int] | list[float]]] = [
            (state.root, [sequence.tokens[-1] for sequence in sequences]),
            (state.previous, [sequence.tokens[-2] for sequence in sequences]),
            (state.num_read, [0] * len(lens)),
            (state.committed, lens + padding),
            (state.max_len, [sequence.max_len for sequence in sequences]),
            (arrays.greedy, [int(p.is_greedy) for p in params]),
        ]
        if all(p.is_greedy for p in params):
            self._write(written)
            return Drawing.GREEDY
        seeds = [sequence.seed for sequence in sequences]
        self._write(
            [
                *written,
                (arrays.temperature, [1.0 if p.is_greedy else p.temperature for p in params]),
                (arrays.top_k, [min(p.top_k or 0, MAX_TOP_K) for p in params]),
                (arrays.top_p, [1.0 if p.top_p is None else p.top_p for p in params]),
                (arrays.min_p, [p.min_p for p in params]),
                (arrays.seed_low, [_signed(seed & _WORD) for seed in seeds]),
                (arrays.seed_high, [_signed(seed >> 32) for seed in seeds]),
            ]
        )
        sizes = [engine.vocab_size for engine in self._engines]
        if any(is_wide(p, min(sizes)) for p in params):
            return Drawing.WIDE
        is_plain = not any(has_filter(p, max(sizes)) for p in params)
        merges = any(engine.merges_draws for engine in self._engines)
        return Drawing.PLAIN if is_plain and merges else Drawing.NARROW

    def write_tables(self, tables: NDArray[np.int32], lens: Items[int]) -> None:
        """Blocks of each request [requests, longest]; `lens` of them are its own."""
        rows, width = tables.shape
        capacity = np.array(lens, np.int32) * np.int32(self._tokens_per_block)
        both = torch.from_numpy(np.concatenate((tables.reshape(-1), capacity)))  # in one transfer
        with device_errors("writing block tables"), self._queue.scope():
            moved = self._queue.to_device(both)
            table = moved[: rows * width].view(rows, width)
            for own in self._tables:
                most = min(width, own.shape[1])  # a draft engine's may be shorter
                own[:rows, :most].copy_(table[:, :most])
            self._state.capacity[:rows].copy_(moved[rows * width :])

    def _write(self, written: list[tuple[torch.Tensor, list[int] | list[float]]]) -> None:
        """The first entries of each array, in one transfer: the device waits for it where a round
        follows a prompt."""
        written = sorted(written, key=lambda each: -each[0].element_size())  # so that all align
        raw = bytearray()
        for array, values in written:
            raw += struct.pack(f"{len(values)}{_FORMATS[array.dtype]}", *values)
        with device_errors("writing request state"), self._queue.scope():
            moved, start = self._queue.to_device(torch.frombuffer(raw, dtype=torch.uint8)), 0
            for array, values in written:
                end = start + len(values) * array.element_size()
                array[: len(values)].copy_(moved[start:end].view(array.dtype))
                start = end


def state_bytes(max_batch_size: int, max_draft_len: int) -> int:
    """Device memory of the requests' state; the ring of records is in host memory."""
    state = RoundState.allocate(max_batch_size, max_draft_len, "meta")
    arrays = [getattr(state, f.name) for f in fields(state) if f.name not in ("ring", "sampling")]
    arrays += [getattr(state.sampling, name) for name in state.sampling.__slots__]
    return sum(array.nbytes for array in arrays)


def tree_bytes(
    plan: Plan,
    max_batch_size: int,
    max_draft_len: int,
    lookahead: LookaheadSizes | None = None,
    *,
    may_grow: bool = False,
) -> int:
    """Device memory of the trees of an engine whose heads draft them, or windows of these sizes,
    and of choosing their tokens; 0 where neither does. may_grow: whether a draft engine may."""
    may_grow = (may_grow or bool(plan.head_caches)) and max_draft_len > 1
    if not plan.heads and lookahead is None and not may_grow:
        return 0
    trees = DraftTrees.allocate(max_batch_size, max_draft_len, "meta")
    arrays = [getattr(trees, f.name) for f in fields(trees) if f.name != "sampling"]
    arrays += [getattr(trees.sampling, name) for name in trees.sampling.__slots__]
    widths = {tensor.name: tensor.shape[-1] for tensor in plan.tensors}
    outputs = [name for graph in plan.heads.values() for name in graph.outputs.values()]
    chunks = [num_chunks(int(widths[name])) for name in outputs]
    if plan.head_shares is not None:
        chunks = [max(each, rank_offers.num_chunks(*plan.head_shares)) for each in chunks]
    keys = sum(num_keys(max_batch_size, each, MOST_RANKS) for each in chunks)
    num_bytes = sum(int(array.nbytes) for array in arrays)
    if lookahead is not None:
        num_bytes += lookahead_bytes(lookahead, max_batch_size, max_draft_len)
    if may_grow:
        num_bytes += growth_bytes(max_batch_size, max_draft_len, int(widths[plan.logits]))
    return num_bytes + 8 * keys


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned word."""
    return word - (1 << 32) if word >> 31 else word
