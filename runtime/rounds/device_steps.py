"""Steps within a round: forward passes on the request state, and draws from their logits.

Everything is enqueued on the engines' common stream; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from llmctl.plugins.backends.cuda.kernel_spec import Launch, StepShape
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.device_loop import tree_kernel
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import DrawnRows, SamplingScratch
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.rounds.upload import Drawing


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The sizes that a graph is captured for."""

    batch: int  # requests, padding included
    max_kv_len: int
    drawing: Drawing
    draft_len: int


class DeviceSteps:
    """Used by drafting and verification: the request state, and engines that run on it."""

    def __init__(
        self,
        engines: Items[CudaEngine],
        queue: DeviceQueue,
        state: RoundState,
        trees: DraftTrees | None = None,
    ) -> None:
        """Allocates what drawing tokens takes. The target comes first among `engines`. `trees`: of
        a drafter whose drafts may branch."""
        self.target = engines[0]
        self.state = state
        self.trees = trees
        self._queue = queue
        rows = max(engine.max_num_rows for engine in engines)
        self._scratch = {
            vocab: SamplingScratch.allocate(rows, vocab, queue.device)
            for vocab in {engine.vocab_size for engine in engines}
        }

    def scratch(self, engine: CudaEngine) -> SamplingScratch:
        """The working memory for drawing from an engine's logits."""
        return self._scratch[engine.vocab_size]

    def launch(self, engine: CudaEngine, launches: Items[Launch]) -> None:
        """Enqueue kernels that an engine holds."""
        engine.program.launch(launches, self._queue.handle)

    def forward(
        self,
        engine: CudaEngine,
        shape: RoundShape,
        count: int,
        rows: int,
        *,
        tree_len: int = 0,
        is_drawn: bool = False,
    ) -> None:
        """Run an engine on `count` tokens of each request, `rows` of them with logits. tree_len:
        most keys from a root's on, of trees. is_drawn: `draw` or `draw_nodes` alone reads the
        logits."""
        step = replace(_step(engine, shape, count, rows), max_tree_len=tree_len)
        if is_drawn and (_stay_with_ranks(engine, shape) or _are_kept(engine, shape, rows)):
            step = replace(step, best_only=True)
        engine.program.enqueue(step, self._queue.handle)

    def attend(
        self, name: str, shape: RoundShape, count: int, rows: int = 1, *, tree_len: int = 0
    ) -> None:
        """Run a head of the target that attends, on `count` tokens of each request; `rows` rows of
        logits for each. tree_len: see `forward`."""
        step = replace(_step(self.target, shape, count, shape.batch * rows), max_tree_len=tree_len)
        self.target.enqueue_attending(name, step)

    def draw(
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
        logits: torch.Tensor | None = None,
    ) -> None:
        """Tokens of the engine's logits, or those of a head of its; row r draws position committed
        + first + r's own place."""
        if shape.drawing is not Drawing.GREEDY:
            places = per_request, first, stride, offset
            own = DrawnRows(rows, self.state.sampling, self.state.committed, *places)
            drawn = self._sampled(engine, out, shape, own, logits)
        elif logits is None and (_stay_with_ranks(engine, shape) or _are_kept(engine, shape, rows)):
            drawn = [engine.program.best_ids(out, rows, stride=stride, offset=offset)]
        else:
            logits, scratch = engine.logits if logits is None else logits, self.scratch(engine)
            drawn = [sampling.argmax(logits, out, scratch, rows, stride=stride, offset=offset)]
        self.launch(engine, drawn)

    def draw_nodes(self, trees: DraftTrees, shape: RoundShape) -> None:
        """The target's tokens behind every node of the trees, each at its own position."""
        engine, state, rows = self.target, self.state, shape.batch * (shape.draft_len + 1)
        if shape.drawing is Drawing.GREEDY:
            self.draw(engine, state.targets, shape, rows)
            return
        own = DrawnRows(rows, trees.sampling, trees.positions)
        drawn = self._sampled(engine, state.targets, shape, own)
        described = state, trees, shape.batch, shape.draft_len
        self.launch(engine, [tree_kernel.spread(*described), *drawn])

    def _sampled(
        self,
        engine: CudaEngine,
        out: torch.Tensor,
        shape: RoundShape,
        rows: DrawnRows,
        logits: torch.Tensor | None = None,
    ) -> list[Launch]:
        """Draws of requests that are not all greedy."""
        scratch = self.scratch(engine)
        if logits is None and _stay_with_ranks(engine, shape):
            return engine.program.best_draws(out, scratch, rows)
        logits = engine.logits if logits is None else logits
        has_wide = shape.drawing is Drawing.WIDE
        return sampling.sample(logits, out, scratch, rows, has_wide=has_wide)


def _stay_with_ranks(engine: CudaEngine, shape: RoundShape) -> bool:
    """Whether ranks hand on the best of their ids instead of logits. Draws with filters compare all
    logits of a row."""
    if shape.drawing is Drawing.GREEDY:
        return engine.shares_logits
    return shape.drawing is Drawing.PLAIN and engine.merges_draws


def _are_kept(engine: CudaEngine, shape: RoundShape, rows: int) -> bool:
    """Whether one rank's product of so many rows keeps the best ids instead of logits."""
    return shape.drawing is Drawing.GREEDY and engine.program.keeps_best(rows)


def _step(engine: CudaEngine, shape: RoundShape, count: int, rows: int) -> StepShape:
    """That of `count` tokens of each request, without trees."""
    return StepShape(
        num_tokens=shape.batch * count,
        num_requests=shape.batch,
        num_rows=rows,
        max_query_len=count,
        max_kv_len=min(shape.max_kv_len, engine.max_seq_len),
    )
