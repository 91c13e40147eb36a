"""Rounds as CUDA graphs: drafting, verification with acceptance, and, for draft methods whose KV
cache has to be updated before the next round, a graph that reads the committed tokens.

All read and write the request state on the device, so a round is two or three graph launches. Its
record is written to pinned host memory and is valid once its event has passed. A capture takes as
long as ten steps. So without drafts, and with adaptive draft lengths, the graphs of greedy rounds
with short contexts are captured before the first request, others while there are no requests, and
the rest when a batch size, a sampling mode or a context bucket is first needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from llmctl.errors import LlmctlError
from llmctl.plugins.backends.cuda.queue import Event, device_errors
from llmctl.plugins.device_loop.state import (
    RECORD_ACCEPTED,
    RECORD_COMMITTED,
    RECORD_DRAFTS,
    RECORD_EMITTED,
    RECORD_TOKENS,
    RoundState,
)
from llmctl.runtime.drafting.drafter import DeviceDrafter
from llmctl.runtime.engines.cuda_engine import Capture, CudaEngine
from llmctl.runtime.engines.graphs import (
    GraphCache,
    capture_graph,
    capture_when,
    kv_bucket,
    kv_buckets,
)
from llmctl.runtime.generate.sampler import is_by_logits
from llmctl.runtime.generate.synthetic_acceptance import DeviceAcceptanceDraws, SyntheticAcceptance
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.rounds import RoundReport, RoundResult
from llmctl.runtime.rounds.tables import KeptTables
from llmctl.runtime.rounds.upload import Drawing, RoundUpload
from llmctl.runtime.rounds.verification import (
    ahead_of_need,
    enqueue_tree_verification,
    enqueue_verification,
    graphs_kept,
)

RING_SLOTS = 8  # records kept; more than rounds are ever in flight


@dataclass(frozen=True, slots=True)
class _Marks:
    """Events of a round: before it, after drafting, after verification, and after it. Between two
    graphs the device takes time for each event, so where nothing is enqueued between two of these
    they are one."""

    began: Event
    drafted: Event
    verified: Event
    ended: Event

    @property
    def each(self) -> list[Event]:
        """Every one of them once."""
        all_four = (self.began, self.drafted, self.verified, self.ended)
        return [self.began, *(b for a, b in pairwise(all_four) if b is not a)]


@dataclass(frozen=True, slots=True)
class _InFlight:
    slot: int
    num_requests: int
    draft_len: int
    marks: _Marks


class CudaRoundRunner:
    """Runs rounds of a target engine and its drafter on their common stream."""

    def __init__(
        self,
        target: CudaEngine,
        drafter: DeviceDrafter,
        capture: Capture | None = None,
        acceptance: SyntheticAcceptance | None = None,
        lengths: Items[int] = (),
    ) -> None:
        """`lengths`: draft lengths whose graphs `prepare` captures."""
        self.drafter = drafter
        engines = [target, *drafter.engines]
        self.max_batch_size = min(engine.max_batch_size for engine in engines)
        if drafter.max_requests is not None:
            self.max_batch_size = min(self.max_batch_size, drafter.max_requests)
        self.max_tokens = min(engine.max_seq_len for engine in engines)
        self._target = target
        self._queue = target.queue
        most_drafts = target.max_draft_len
        ring = torch.zeros(
            (RING_SLOTS, target.max_batch_size, RECORD_TOKENS + most_drafts + 1),
            dtype=torch.int32,
            pin_memory=self._queue.stream is not None,
        )
        device = self._queue.device
        self._ring = ring.numpy()
        with device_errors("allocating request state"), self._queue.scope():
            self._state = RoundState.allocate(
                target.max_batch_size, most_drafts, device, slots=RING_SLOTS, ring=ring
            )
            forced = None
            if acceptance is not None:
                forced = DeviceAcceptanceDraws(acceptance, device)
            trees = drafter.make_trees(target.max_batch_size, most_drafts, device)
            steps = DeviceSteps(engines, self._queue, self._state, trees)
            drafter.bind(steps)
            self._upload = RoundUpload(self._state, engines, self._queue, drafter.block_tables)
        self._has_trees = trees is not None
        # The objects that graphs are captured from do not refer to the runner: in a cycle they
        # would outlive it.
        self._verify: Callable[[RoundShape], None] = partial(enqueue_verification, steps, forced)
        if self._has_trees:
            assert forced is None, "trees are not accepted at random"
            self._verify = partial(enqueue_tree_verification, steps, drafter.branches)
        capture = partial(
            capture_when,
            lambda: all(engine.is_capturable() for engine in engines),
            capture or partial(capture_graph, self._queue),
        )
        self._lengths = tuple(lengths)
        ahead = ahead_of_need(self.max_batch_size, self._lengths)
        # Adaptive draft lengths verify more shapes than they draft, so each kind has its own bound.
        kept = graphs_kept(len(engines))
        self._draft_graphs: GraphCache[RoundShape] = GraphCache(
            capture,
            kept * drafter.draft_len + sum(length for _, length in ahead),
            lambda shape: shape.draft_len,
        )
        self._verify_graphs: GraphCache[RoundShape] = GraphCache(capture, kept + len(ahead))
        self._reading_graphs: GraphCache[RoundShape] = GraphCache(capture, kept + len(ahead))
        # What rounds had so far: batch sizes with draft lengths, and ways of drawing, in order.
        self._pairs: dict[tuple[int, int], None] = {}
        self._drawings: dict[Drawing, None] = {Drawing.GREEDY: None}
        self._most_sequences = self.max_batch_size
        self._num_started = 0
        self._num_requests = 0
        self._drawing = Drawing.GREEDY
        self._tables = KeptTables()  # as stored on the device
        self._in_flight: deque[_InFlight] = deque()
        self._spare_events: list[Event] = []

    def can_run(self, sequence: Sequence) -> bool:
        """True unless a token depends on more than logits, seed and position, or drafting lacks
        what it begins with."""
        request = sequence.request
        params = request.sampling_config
        if not self.drafter.can_draft(sequence):
            return False
        if not is_by_logits(request) or request.output_config.return_log_probs:
            return False
        return sequence.num_new_tokens >= params.min_tokens or not request.end_ids

    def prepare(self, max_batch_size: int, max_num_tokens: int) -> None:
        """Capture the graphs of rounds of up to so many sequences, running each on padding, and
        pack the launches of catch-ups and prompts. Caches must exist, and no sequence has
        started."""
        if max_num_tokens:
            self._target.prepare_prompts(max_num_tokens)
        self._most_sequences = min(max_batch_size, self.max_batch_size)
        if not self._lengths:
            return
        shape = self._shape(0, 0)
        for batch, draft_len in ahead_of_need(self._most_sequences, self._lengths):
            self._run(replace(shape, batch=batch, draft_len=draft_len))
        self.drafter.prepare()
        self.abandon()

    def prepare_more(self) -> bool:
        """Capture the graphs of one more shape, by running it on padding; see RoundRunner."""
        shape = next(self._ahead(), None)
        if shape is None:
            return False
        self.begin([])
        self._run(shape)
        self.abandon()
        return True

    @property
    def num_captured(self) -> int:
        """Of drafting, verification and reading together."""
        kinds = (self._draft_graphs, self._verify_graphs, self._reading_graphs)
        return sum(graphs.num_captured for graphs in kinds)

    def _ahead(self) -> Iterator[RoundShape]:
        """Shapes that rounds may have and that are not captured, as many as there is room for:
        every context length for each pair that rounds had so far, then for every batch size with
        each draft length that they had, or have for certain."""
        lengths = {length for _, length in self._pairs}
        if len(self._lengths) < 2:  # they do not adapt
            lengths |= {*self._lengths} or {self.drafter.draft_len}
        every = ahead_of_need(self._most_sequences, sorted(lengths))
        for pairs in (self._pairs, every):
            for longest in kv_buckets(self._target.program.limits):
                for drawing in self._drawings:
                    for batch, draft_len in pairs:
                        shape = RoundShape(batch, longest, drawing, draft_len)
                        if shape not in self._verify_graphs and self._has_room(shape):
                            yield shape

    def _has_room(self, shape: RoundShape) -> bool:
        has_drafts = not shape.draft_len or self._draft_graphs.has_room(shape)
        return has_drafts and self._verify_graphs.has_room(shape)

    def begin(self, sequences: Items[Sequence]) -> None:
        """Write the requests' state; the rest of the batch is padding."""
        self._num_requests = len(sequences)
        self._tables.forget()
        self._drawing = self._upload.write_sequences(sequences)
        self.drafter.begin(sequences)

    def enqueue(self, block_tables: Items[Items[int]], draft_len: int) -> None:
        """A launch for each graph, after updating the block tables if they changed."""
        tables = self._tables
        if tables.update(block_tables):
            self._upload.write_tables(tables.array, tables.lens)
        shape = self._shape(tables.array.shape[1], draft_len)
        self._pairs[shape.batch, draft_len] = self._drawings[shape.drawing] = None
        marks = self._run(shape)
        slot = self._num_started % RING_SLOTS
        self._in_flight.append(_InFlight(slot, self._num_requests, draft_len, marks))
        self._num_started += 1

    def collect(self) -> RoundReport:
        """Wait for the oldest round and read its record."""
        done = self._in_flight.popleft()
        marks = done.marks
        with device_errors("waiting for a round"):
            marks.ended.synchronize()
            self._queue.check()
            draft_ms = marks.began.elapsed_time(marks.drafted)
            verify_ms = marks.drafted.elapsed_time(marks.verified)
            draft_ms += marks.verified.elapsed_time(marks.ended)
        self._spare_events += marks.each
        results = []
        rows = self._ring[done.slot, : done.num_requests].tolist()
        if self._has_trees:
            self.drafter.end([row[RECORD_ACCEPTED] for row in rows], done.draft_len)
        for row in rows:
            tokens = row[RECORD_TOKENS : RECORD_TOKENS + row[RECORD_EMITTED]]
            results.append(RoundResult(row[RECORD_COMMITTED], tokens, row[RECORD_DRAFTS]))
        return RoundReport(results, draft_ms / 1e3, verify_ms / 1e3)

    def forget(self) -> None:
        """Leave the rounds in flight to whoever else reads them."""
        while self._in_flight:
            self._spare_events += self._in_flight.popleft().marks.each

    def abandon(self) -> None:
        """Forget the rounds in flight."""
        self._in_flight.clear()
        self._num_requests = 0
        # The failure has been reported; if waiting for the device fails, so does the next step.
        with suppress(LlmctlError, RuntimeError):
            self._queue.synchronize()
            self._num_started = int(self._state.counter.item())

    def _run(self, shape: RoundShape) -> _Marks:
        """Enqueue a round."""
        draft, read = self.drafter.enqueue_drafts, self.drafter.enqueue_reading
        verify = self._verify
        with device_errors("running a round"), self._queue.scope():
            began = drafted = self._mark()
            if shape.draft_len:
                self._draft_graphs.run(shape, lambda: draft(shape))
                drafted = self._mark()
            self._verify_graphs.run(shape, lambda: verify(shape))
            verified = ended = self._mark()
            if self.drafter.reads(shape.draft_len):
                self._reading_graphs.run(shape, lambda: read(shape))
                ended = self._mark()
        return _Marks(began, drafted, verified, ended)

    def _mark(self) -> Event:
        """An event, recorded."""
        event = self._spare_events.pop() if self._spare_events else self._queue.make_event()
        event.record()
        return event

    def _shape(self, num_blocks: int, draft_len: int) -> RoundShape:
        """The shape of a round whose longest request has so many blocks."""
        longest = num_blocks * self._target.tokens_per_block
        batch = min(1 << max(0, self._num_requests - 1).bit_length(), self.max_batch_size)
        limits = self._target.program.limits
        return RoundShape(batch, kv_bucket(longest, limits), self._drawing, draft_len)
