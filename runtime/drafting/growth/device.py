"""Trees that grow in device rounds, whatever computes their levels."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep
from llmctl.plugins.backends.cuda.queue import device_errors
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.ops.tree_growth import kernel
from llmctl.plugins.ops.tree_growth.arrays import GrowthArrays, TreeShape
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.upload import Drawing


class DeviceGrowth:
    """Between the steps of the levels, chooses the drafts that are kept and followed. The drafts of
    a request are those that the host would grow; sampled ones draft a chain, with the target's own
    noise."""

    def __init__(
        self,
        shape: TreeShape,
        steps: DeviceSteps,
        engine: CudaEngine,
        state: RoundState,
        *,
        of_pairs: bool,
    ) -> None:
        """engine: it, or a head of it, computes the levels. state: the requests as that sees them.
        of_pairs: see `kernel.grow`."""
        self.shape, self._steps, self._engine = shape, steps, engine
        self._state, self._of_pairs = state, of_pairs
        sizes = state.max_batch_size, state.max_draft_len
        device = engine.queue.device
        self.arrays = GrowthArrays.allocate(*sizes, shape, engine.vocab_size, device)

    def begin(self, sequences: Items[Sequence]) -> None:
        """These are the sequences of the next rounds."""
        queue = self._engine.queue
        found = [sequence.request.end_id for sequence in sequences]
        ends = torch.tensor([-1 if end is None else end for end in found], dtype=torch.int32)
        with device_errors("writing the ends of texts"), queue.scope():
            self.arrays.ends[: len(ends)].copy_(queue.to_device(ends))

    def enqueue_level(
        self, shape: RoundShape, level: int, logits: torch.Tensor, step: DeviceStep
    ) -> None:
        """Take what the rows of a level offer, 0 being the roots'. If there is a further level,
        `step` is then the one that computes it."""
        steps, engine, arrays = self._steps, self._engine, self.arrays
        assert steps.trees is not None, "of `make_trees`"
        batch, each = shape.batch, self.shape.width if level else 1
        if shape.drawing is not Drawing.GREEDY:
            where = arrays.rows.view(-1, each)[:batch, 0] if level else arrays.roots[:batch]
            chosen = arrays.chosen[:batch]
            torch.index_select(logits, 0, where, out=chosen)
            steps.draw(engine, arrays.drawn, shape, batch, first=level, stride=each, logits=chosen)
        num_ids = min(engine.vocab_size, steps.target.vocab_size)
        offered = kernel.offer(logits, arrays, batch * each, is_root=level == 0, num_ids=num_ids)
        described = step, engine.program.limits, batch, shape.draft_len, level
        grown = kernel.grow(arrays, self._state, steps.trees, *described, of_pairs=self._of_pairs)
        steps.launch(engine, [*offered, grown])

    def enqueue_moves(self, shape: RoundShape, step: DeviceStep) -> None:
        """Move the keys of the accepted paths in the engine's own cache, behind acceptance."""
        steps, engine, arrays, batch = self._steps, self._engine, self.arrays, shape.batch
        assert steps.trees is not None, "of `make_trees`"
        described = step, engine.program.limits, batch, shape.draft_len
        listed = kernel.list_moves(arrays, self._state, steps.trees, *described)
        steps.launch(engine, [listed])
        engine.enqueue_moves(arrays.starts[: batch + 1], arrays.moves)
