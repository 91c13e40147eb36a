"""Trees of a draft engine in device rounds: a level is a step, and between the steps kernels choose
the drafts that are kept and followed (growth/device.py), as the host does.

A step has a token for each draft of the level that is followed; where that is one, it is a step of
a chain.
Behind acceptance their keys are moved to the positions of the accepted tokens; the last of these
may have none and is read again, as a round begins with the last two tokens of each request.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.tree_growth.arrays import TreeShape
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.fed import FedDraftEngine
from llmctl.runtime.drafting.drafter import OnRank0
from llmctl.runtime.drafting.growth.device import DeviceGrowth
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape
from llmctl.runtime.rounds.verification import MOST_FED


class DeviceDraftTrees(FedDraftEngine, OnRank0):
    """See DeviceDrafter. Sampled requests draft a chain, with the target's own noise."""

    block_tables: Items[torch.Tensor] = ()

    def __init__(self, draft: CudaEngine, tree: TreeShape, draft_len: int) -> None:
        super().__init__(draft, draft_len, max(MOST_FED, tree.width))
        self._shape = tree

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees:
        """Trees that every round makes anew."""
        return DraftTrees.allocate(max_batch_size, max_draft_len, device)

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        super().bind(steps)
        self._growth = DeviceGrowth(self._shape, steps, self._draft, steps.state, of_pairs=False)

    def branches(self, draft_len: int) -> bool:
        return draft_len > 1

    def depth(self, draft_len: int) -> int:
        return self._shape.levels(draft_len)

    def can_draft(self, sequence: Sequence) -> bool:
        return True

    def begin(self, sequences: Items[Sequence]) -> None:
        self._growth.begin(sequences)

    def end(self, nodes: Items[int], draft_len: int) -> None:
        """Acceptance on the device says all that the next round reads."""

    def reads(self, draft_len: int) -> bool:
        # Else keys are where they are to be: nobody was followed, or a chain.
        return draft_len > 1 and not self._shape.is_followed_one_by_one

    def enqueue_drafts(self, shape: RoundShape) -> None:
        steps, draft, tree = self._steps, self._draft, self._shape
        program, batch, draft_len = draft.program, shape.batch, shape.draft_len
        first = bookkeeping.draft_first(steps.state, program.step, program.limits, batch)
        steps.launch(steps.target, [first])
        steps.forward(draft, shape, MOST_FED, batch)
        for level in range(tree.levels(draft_len)):
            if level:
                width, tree_len = tree.width, tree.keys_of_tree(level, draft_len)
                steps.forward(draft, shape, width, batch * width, tree_len=tree_len)
            self._growth.enqueue_level(shape, level, draft.logits, program.step)

    def enqueue_reading(self, shape: RoundShape) -> None:
        self._growth.enqueue_moves(shape, self._draft.program.step)

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        valid = committed + max(accepted - 1, 0)  # the last may have been followed by nobody
        sequence.kv_lens[DRAFT_GROUP] = min(valid, len(sequence.tokens) - 1)
