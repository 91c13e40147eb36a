"""What a round enqueues: the draft loop, and verification with acceptance.

Both read and write the request state on the device (plugins/device_loop); nothing here waits. Which
of it is captured as a graph, and when, is decided by `cuda_rounds.py`; how many graphs are kept,
and which are captured before they are needed, is said here for it and for the memory plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepShape
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import SamplingScratch
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.graphs import MAX_GRAPHS
from llmctl.runtime.generate.synthetic_acceptance import LOT_LAUNCHES, DeviceAcceptanceDraws
from llmctl.runtime.rounds.upload import Drawing

LAUNCHES_A_STEP = 6  # beside the operators: feeding it, drawing from its logits (4), acceptance
# Tokens of a verification whose graph is captured ahead: more are slow, so many drafts seldom pay.
AHEAD_TOKENS = 512


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What a graph is captured for."""

    batch: int  # requests, padding included
    max_kv_len: int
    drawing: Drawing
    draft_len: int


class RoundWork:
    """Enqueues rounds of a target engine, alone or with a draft engine, on their common queue."""

    def __init__(
        self,
        target: CudaEngine,
        draft: CudaEngine | None,
        queue: DeviceQueue,
        state: RoundState,
        lots: DeviceAcceptanceDraws | None,
    ) -> None:
        """Allocates what drawing tokens takes."""
        self._target, self._draft = target, draft
        self._queue = queue
        self._state = state
        self._lots = lots
        engines = [engine for engine in (target, draft) if engine is not None]
        rows = max(engine.max_num_rows for engine in engines)
        self._scratch = {
            vocab: SamplingScratch.allocate(rows, vocab, queue.device)
            for vocab in {engine.vocab_size for engine in engines}
        }

    def draft_loop(self, shape: RoundShape) -> None:
        """draft_len steps of the draft engine, each fed with the token the last one drew."""
        draft = self._draft
        assert draft is not None
        batch, last = shape.batch, shape.draft_len - 1
        is_greedy = shape.drawing is Drawing.GREEDY  # then a step is described by what draws for it
        for index in range(shape.draft_len):
            self._feed_draft(draft, shape, index)
            self._forward(draft, shape, 2 if index == 0 else 1, batch)
            if is_greedy and index < last:
                continue
            drafts, stride = self._state.drafts, self._state.max_draft_len
            self._launch(
                draft,
                self._draw(draft, drafts, shape, batch, first=index, stride=stride, offset=index),
            )

    def _feed_draft(self, draft: CudaEngine, shape: RoundShape, index: int) -> None:
        """Describe the draft's step `index`; of greedy drafts, draw the one that it is fed with."""
        state, program = self._state, draft.program
        described = state, program.step, program.limits, shape.batch
        if index == 0:
            self._launch(self._target, [bookkeeping.draft_first(*described)])
        elif shape.drawing is Drawing.GREEDY:
            scratch = self._scratch[draft.vocab_size]
            drawn = bookkeeping.draw_next(draft.logits, scratch, *described, index)
            self._launch(draft, [drawn])
        else:
            self._launch(self._target, [bookkeeping.draft_next(*described, index)])

    def verify(self, shape: RoundShape) -> None:
        """One target step over the root and all drafts, then acceptance."""
        target, state, batch = self._target, self._state, shape.batch
        program, count = target.program, shape.draft_len + 1
        rows = batch * count
        feed = bookkeeping.verify(state, program.step, program.limits, batch, shape.draft_len)
        self._launch(target, [feed])
        self._forward(target, shape, count, rows)
        self._launch(target, self._draw(target, state.targets, shape, rows, per_request=count))
        if self._lots is not None:
            self._lots.force(state, batch, shape.draft_len)
        self._launch(target, [bookkeeping.accept(state, batch, shape.draft_len)])

    def _forward(self, engine: CudaEngine, shape: RoundShape, count: int, rows: int) -> None:
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
        engine: CudaEngine,
        out: torch.Tensor,
        shape: RoundShape,
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
        if shape.drawing is Drawing.GREEDY:
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
            has_wide=shape.drawing is Drawing.WIDE,
        )

    def _launch(self, engine: CudaEngine, launches: Items[Launch]) -> None:
        engine.program.launch(launches, self._queue.handle)


# ---- how many requests and graphs ----


def most_requests(batch_sizes: Iterable[int], draft_tokens: int | None) -> int:
    """Requests of a round: no more than each engine's batch, and with a draft engine half of the
    tokens it takes at once, for its first step may have two of each. 0: none."""
    most = min(batch_sizes)
    return most if draft_tokens is None else min(most, draft_tokens // 2)


def graphs_kept(has_draft: bool) -> int:
    """Graphs of one kind, of drafting or of verification, that a runner keeps beside those it
    captured ahead."""
    return MAX_GRAPHS // 2 if has_draft else MAX_GRAPHS


def ahead_of_need(max_batch_size: int, lengths: Items[int]) -> list[tuple[int, int]]:
    """Batch sizes and draft lengths to capture before the first request: each size that rounds are
    padded to with each of `lengths`, as far as AHEAD_TOKENS go."""
    sizes = {min(1 << power, max_batch_size) for power in range(max_batch_size.bit_length() + 1)}
    sizes -= {0}
    return [
        (batch, length)
        for batch in sorted(sizes)
        for length in lengths
        if length == 0 or batch * (length + 1) <= AHEAD_TOKENS
    ]


def graph_launches(
    num_kernels: int, num_steps: int, has_draft: bool, ahead: Iterable[int] = ()
) -> int:
    """Launches in all graphs that a runner keeps of one engine, at most: steps of up to
    `num_kernels` kernels, `num_steps` of them a graph or as many as `ahead` says of each graph
    captured ahead, and what forces acceptance by lot."""
    ahead = list(ahead)
    steps = graphs_kept(has_draft) * num_steps + sum(ahead)
    num_graphs = graphs_kept(has_draft) + len(ahead)
    return steps * (num_kernels + LAUNCHES_A_STEP) + num_graphs * LOT_LAUNCHES
