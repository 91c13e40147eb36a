"""Trees of a draft engine in device rounds: a level is a step, and between the steps kernels choose
the drafts that are kept and followed (plugins/ops/tree_growth/), as the host does.

A step has a token for each place behind the root that a draft may have by then, of which only the
drafts that are followed are stored. Behind acceptance their keys are moved to the positions of the
accepted tokens; the last of these may have none and is read again, as a round begins with the last
two tokens of each request.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from llmctl.plugins.backends.cuda.queue import device_errors
from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.tree_growth import kernel as growth
from llmctl.plugins.ops.tree_growth.arrays import GrowthArrays, TreeShape
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.fed import FedDraftEngine
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.upload import Drawing
from llmctl.runtime.rounds.verification import MOST_FED


class DeviceDraftTrees(FedDraftEngine):
    """See DeviceDrafter. Sampled requests draft a chain, with the target's own noise."""

    block_tables: Items[torch.Tensor] = ()

    def __init__(self, draft: CudaEngine, tree: TreeShape, draft_len: int) -> None:
        super().__init__(draft, draft_len, max(MOST_FED, draft_len))
        self._shape = tree

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees:
        """Trees that every round makes anew."""
        return DraftTrees.allocate(max_batch_size, max_draft_len, device)

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        super().bind(steps)
        state, draft = steps.state, self._draft
        sizes = state.max_batch_size, state.max_draft_len, self._shape, draft.vocab_size
        self._arrays = GrowthArrays.allocate(*sizes, draft.queue.device)

    def branches(self, draft_len: int) -> bool:
        return draft_len > 1

    def depth(self, draft_len: int) -> int:
        return self._shape.levels(draft_len)

    def can_draft(self, sequence: Sequence) -> bool:
        return True

    def begin(self, sequences: Items[Sequence]) -> None:
        queue = self._draft.queue
        found = [sequence.request.end_id for sequence in sequences]
        ends = torch.tensor([-1 if end is None else end for end in found], dtype=torch.int32)
        with device_errors("writing the ends of texts"), queue.scope():
            self._arrays.ends[: len(ends)].copy_(queue.to_device(ends))

    def end(self, nodes: Items[int], draft_len: int) -> None:
        """Acceptance on the device says all that the next round reads."""

    def reads(self, draft_len: int) -> bool:
        return draft_len > 1  # a single draft is never followed

    def enqueue_drafts(self, shape: RoundShape) -> None:
        steps, draft, arrays, tree = self._steps, self._draft, self._arrays, self._shape
        assert steps.trees is not None, "of `make_trees`"
        program, batch, draft_len = draft.program, shape.batch, shape.draft_len
        described = program.step, program.limits, batch
        num_ids = min(draft.vocab_size, steps.target.vocab_size)
        steps.launch(steps.target, [bookkeeping.draft_first(steps.state, *described)])
        for level in range(tree.levels(draft_len)):
            each = tree.width if level else 1
            if level:
                count = tree.places(level, draft_len)
                steps.forward(draft, shape, count, batch * each, has_trees=True)
            else:
                steps.forward(draft, shape, MOST_FED, batch)
            if shape.drawing is not Drawing.GREEDY:
                rows = batch * each
                steps.draw(draft, arrays.drawn, shape, rows, per_request=each, first=level)
            offered = draft.logits, arrays, batch * each
            launches = growth.offer(*offered, is_root=level == 0, num_ids=num_ids)
            state = arrays, steps.state, steps.trees
            grown = growth.grow(*state, *described, draft_len, level, by_token=False)
            steps.launch(draft, [*launches, grown])

    def enqueue_reading(self, shape: RoundShape) -> None:
        steps, draft, arrays, batch = self._steps, self._draft, self._arrays, shape.batch
        assert steps.trees is not None, "of `make_trees`"
        described = draft.program.step, draft.program.limits, batch, shape.draft_len
        steps.launch(draft, [growth.list_moves(arrays, steps.state, steps.trees, *described)])
        draft.enqueue_moves(arrays.starts[: batch + 1], arrays.moves)

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        valid = committed + max(accepted - 1, 0)  # the last may have been followed by nobody
        sequence.kv_lens[DRAFT_GROUP] = min(valid, len(sequence.tokens) - 1)
