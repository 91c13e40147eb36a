"""Rounds as two CUDA graphs: the draft loop, and verification with acceptance.

Both read and write the request state on the device (plugins/rounds), so round after round is two
graph launches. A round's record lands in pinned host memory and is valid once its event has passed.
Graphs are captured when a batch size, a way of sampling or a reach of the cache is first needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from llmctl.errors import LlmctlError
from llmctl.plugins.cuda.kernel import Launch, StepShape
from llmctl.plugins.cuda.queue import Event, device_errors
from llmctl.plugins.rounds import kernel as bookkeeping
from llmctl.plugins.rounds.state import (
    RECORD_COMMITTED,
    RECORD_EMITTED,
    RECORD_TOKENS,
    RoundState,
)
from llmctl.plugins.sampling import kernel as sampling
from llmctl.plugins.sampling.arrays import SamplingScratch
from llmctl.runtime.core import Sequence
from llmctl.runtime.cuda_engine import Capture, CudaExecutable
from llmctl.runtime.graphs import (
    MAX_GRAPHS,
    GraphCache,
    capture_graph,
    capture_when,
    kv_bucket,
)
from llmctl.runtime.round_state import RoundUpload
from llmctl.runtime.rounds import RoundReport, RoundResult
from llmctl.runtime.sampler import is_by_logits
from llmctl.runtime.step import pack_tables
from llmctl.runtime.synthetic import LOT_LAUNCHES, DeviceLots, SyntheticAcceptance

RING_SLOTS = 8  # records kept; more than rounds are ever in flight
LAUNCHES_A_STEP = 6  # beside the operators: feeding it, drawing from its logits (4), acceptance

Events = tuple[Event, Event, Event]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a graph is captured for."""

    batch: int  # requests, padding included
    max_kv_len: int
    is_greedy: bool
    draft_len: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    slot: int
    num_requests: int
    began: Event
    drafted: Event
    ended: Event


class CudaRoundRunner:
    """Rounds of a target engine, alone or with a draft engine, on their common stream."""

    def __init__(
        self,
        target: CudaExecutable,
        draft: CudaExecutable | None,
        draft_len: int,
        capture: Capture | None = None,
        acceptance: SyntheticAcceptance | None = None,
    ) -> None:
        self.draft_len = draft_len
        self.has_draft_engine = draft is not None
        engines = [engine for engine in (target, draft) if engine is not None]
        self.max_batch_size = min(engine.max_batch_size for engine in engines)
        self.max_tokens = min(engine.max_seq_len for engine in engines)
        self._target, self._draft = target, draft
        self._queue = target.queue
        most_drafts = target.max_draft_len
        ring = torch.zeros(
            (RING_SLOTS, target.max_batch_size, RECORD_TOKENS + most_drafts + 1),
            dtype=torch.int32,
            pin_memory=self._queue.stream is not None,
        )
        device = self._queue.device
        self._ring = ring.numpy()
        rows = max(engine.max_num_rows for engine in engines)
        with device_errors("allocating request state"), self._queue.scope():
            self._state = RoundState.allocate(
                target.max_batch_size, most_drafts, device, slots=RING_SLOTS, ring=ring
            )
            self._upload = RoundUpload(self._state, engines, self._queue)
            self._scratch = {
                vocab: SamplingScratch.allocate(rows, vocab, device)
                for vocab in {engine.vocab_size for engine in engines}
            }
            self._lots = DeviceLots(acceptance, device) if acceptance is not None else None
        capture = partial(
            capture_when,
            lambda: all(engine.is_capturable() for engine in engines),
            capture or partial(capture_graph, self._queue),
        )
        # Adaptive draft lengths verify more shapes than they draft, so each kind has its own bound.
        max_graphs = round_graphs(draft is not None)
        self._draft_graphs: GraphCache[_Shape] = GraphCache(capture, max_graphs)
        self._verify_graphs: GraphCache[_Shape] = GraphCache(capture, max_graphs)
        self._num_started = 0
        self._num_requests = 0
        self._is_greedy = True
        self._tables = np.zeros((0, 0), np.int32)  # as they lie on the device
        self._lens: list[int] = []  # blocks of each request in them
        self._in_flight: deque[_InFlight] = deque()
        self._spare_events: list[Events] = []

    def can_run(self, sequence: Sequence) -> bool:
        """True unless a token depends on more than logits, seed and position."""
        request = sequence.request
        params = request.sampling_config
        if not is_by_logits(request) or request.output_config.return_log_probs:
            return False
        return request.end_id is None or sequence.num_new_tokens >= params.min_tokens

    def begin(self, sequences: Items[Sequence]) -> None:
        """Write the requests' state; the rest of the batch is padding."""
        self._num_requests = len(sequences)
        self._lens = []
        self._is_greedy = self._upload.write_sequences(sequences)

    def enqueue(self, block_tables: Items[Items[int]], draft_len: int) -> None:
        """Two graph launches, after the block tables where they changed."""
        tables, lens = pack_tables(block_tables), list(map(len, block_tables))
        if lens != self._lens or not np.array_equal(tables, self._tables):
            self._upload.write_tables(tables, lens)
            self._tables, self._lens = tables, lens
        shape = self._shape(tables.shape[1], draft_len)
        events = self._take_events()
        with device_errors("running a round"), self._queue.scope():
            events[0].record()
            if self._draft is not None and draft_len:
                self._draft_graphs.run(shape, lambda: self._draft_loop(shape))
            events[1].record()
            self._verify_graphs.run(shape, lambda: self._verify(shape))
            events[2].record()
        slot = self._num_started % RING_SLOTS
        self._in_flight.append(_InFlight(slot, self._num_requests, *events))
        self._num_started += 1

    def collect(self) -> RoundReport:
        """Wait for the oldest round and read its record."""
        done = self._in_flight.popleft()
        with device_errors("waiting for a round"):
            done.ended.synchronize()
            draft_ms = done.began.elapsed_time(done.drafted)
            verify_ms = done.drafted.elapsed_time(done.ended)
        self._spare_events.append((done.began, done.drafted, done.ended))
        results = []
        for row in self._ring[done.slot, : done.num_requests].tolist():
            tokens = row[RECORD_TOKENS : RECORD_TOKENS + row[RECORD_EMITTED]]
            results.append(RoundResult(row[RECORD_COMMITTED], tokens))
        return RoundReport(results, draft_ms / 1e3, verify_ms / 1e3)

    def abandon(self) -> None:
        """Forget the rounds in flight."""
        self._in_flight.clear()
        self._num_requests = 0
        # The failure has been reported; a device that cannot be waited for fails the next step.
        with suppress(LlmctlError, RuntimeError):
            self._queue.synchronize()
            self._num_started = int(self._state.counter.item())

    # ---- what a round enqueues ----

    def _draft_loop(self, shape: _Shape) -> None:
        """draft_len steps of the draft engine, each fed with the token the last one drew."""
        draft = self._draft
        assert draft is not None
        program, state, batch = draft.program, self._state, shape.batch
        for index in range(shape.draft_len):
            count = 1
            if index == 0:
                count = 2
                feed = bookkeeping.draft_first(state, program.step, program.limits, batch)
            else:
                feed = bookkeeping.draft_next(state, program.step, program.limits, batch, index)
            self._launch(self._target, [feed])
            self._forward(draft, shape, count, batch)
            self._launch(
                draft,
                self._draw(
                    draft,
                    state.drafts,
                    shape,
                    batch,
                    first=index,
                    stride=state.max_draft_len,
                    offset=index,
                ),
            )

    def _verify(self, shape: _Shape) -> None:
        """One target step over the root and all drafts, then acceptance."""
        target, state, batch = self._target, self._state, shape.batch
        program, count = target.program, shape.draft_len + 1
        rows = batch * count
        feed = bookkeeping.verify(state, program.step, program.limits, batch, shape.draft_len)
        self._launch(target, [feed])
        self._forward(target, shape, count, rows)
        self._launch(target, self._draw(target, state.targets, shape, rows, per_request=count))
        if self._lots is not None and shape.draft_len:
            self._lots.force(state, batch, shape.draft_len)
        self._launch(target, [bookkeeping.accept(state, batch, shape.draft_len)])

    def _forward(self, engine: CudaExecutable, shape: _Shape, count: int, rows: int) -> None:
        step = StepShape(
            num_tokens=shape.batch * count,
            num_requests=shape.batch,
            num_rows=rows,
            max_query_len=count,
            max_kv_len=min(shape.max_kv_len, engine.max_seq_len),
        )
        engine.program.enqueue(step, self._queue.handle)

    def _draw(
        self,
        engine: CudaExecutable,
        out: torch.Tensor,
        shape: _Shape,
        rows: int,
        *,
        per_request: int = 1,
        first: int = 0,
        stride: int = 1,
        offset: int = 0,
    ) -> list[Launch]:
        """Tokens of the engine's logits; row r draws position committed + first + r's own place."""
        scratch = self._scratch[engine.vocab_size]
        logits = engine.logits
        if shape.is_greedy:
            return [sampling.argmax(logits, out, scratch, rows, stride=stride, offset=offset)]
        return sampling.sample(
            logits,
            out,
            scratch,
            rows,
            self._state.sampling,
            self._state.committed,
            per_request=per_request,
            first=first,
            stride=stride,
            offset=offset,
        )

    def _launch(self, engine: CudaExecutable, launches: Items[Launch]) -> None:
        engine.program.launch(launches, self._queue.handle)

    def _shape(self, num_blocks: int, draft_len: int) -> _Shape:
        """Of a round whose longest request has so many blocks."""
        longest = num_blocks * self._target.tokens_per_block
        batch = min(1 << (self._num_requests - 1).bit_length(), self.max_batch_size)
        limits = self._target.program.limits
        return _Shape(batch, kv_bucket(longest, limits), self._is_greedy, draft_len)

    def _take_events(self) -> Events:
        if self._spare_events:
            return self._spare_events.pop()
        began, drafted, ended = (self._queue.make_event() for _ in range(3))
        return began, drafted, ended


def round_graphs(has_draft: bool) -> int:
    """Graphs of one kind, of drafting or of verification, that a runner keeps at most."""
    return MAX_GRAPHS // 2 if has_draft else MAX_GRAPHS


def graph_launches(num_kernels: int, num_steps: int, has_draft: bool) -> int:
    """Launches in all graphs that a runner keeps of one engine, at most: `num_steps` steps of up
    to `num_kernels` kernels a graph, and what forces acceptance by lot."""
    launches = num_steps * (num_kernels + LAUNCHES_A_STEP) + LOT_LAUNCHES
    return round_graphs(has_draft) * launches
