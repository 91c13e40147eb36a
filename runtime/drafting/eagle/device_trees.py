"""Trees of an EAGLE head in device rounds: a level is a step of the head, each draft along its own
path, and between the steps kernels choose the drafts that are kept and followed, as the host does.

Behind acceptance the head reads the rows of the accepted path, and writes its keys over those of
drafts; so nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from llmctl.builder.engine_format import EAGLE_EXTEND, EAGLE_NEXT, EAGLE_STATE
from llmctl.plugins.device_loop import pairs_kernel
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.tree_growth.arrays import TreeShape
from llmctl.runtime.drafting.eagle.device import LOGITS, DeviceEagle
from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
from llmctl.runtime.drafting.growth.device import DeviceGrowth
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape


class DeviceEagleTrees(DeviceEagle):
    """See DeviceDrafter. Sampled requests draft a chain, with the target's own noise."""

    def __init__(
        self, target: CudaEngine, host: EagleDrafter, tree: TreeShape, draft_len: int
    ) -> None:
        super().__init__(target, host, draft_len)
        self._shape = tree

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees:
        """Trees that every round makes anew."""
        self._sources = torch.zeros(
            max_batch_size * (max_draft_len + 1), dtype=torch.int32, device=device
        )
        return DraftTrees.allocate(max_batch_size, max_draft_len, device)

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        super().bind(steps)
        self._growth = DeviceGrowth(self._shape, steps, self._target, self._pairs, of_pairs=True)

    def branches(self, draft_len: int) -> bool:
        return draft_len > 1

    def depth(self, draft_len: int) -> int:
        return min(draft_len, self._shape.depth)  # of a chain, too

    def begin(self, sequences: Items[Sequence]) -> None:
        super().begin(sequences)
        self._growth.begin(sequences)

    def enqueue_drafts(self, shape: RoundShape) -> None:
        tree, following = self._shape, self._steps_of[EAGLE_NEXT]
        graph = EAGLE_EXTEND
        for level in range(tree.levels(shape.draft_len)):
            if level:
                rows = self._growth.arrays.sources[: shape.batch * tree.width]
                state = [self._left(graph, EAGLE_STATE)]
                self._target.pass_chosen(EAGLE_NEXT, EAGLE_STATE, state, rows)
                tree_len = tree.keys_of_tree(level, shape.draft_len)
                self._steps.attend(EAGLE_NEXT, shape, tree.width, tree.width, tree_len=tree_len)
                graph = EAGLE_NEXT
            self._growth.enqueue_level(shape, level, self._left(graph, LOGITS), following)

    def enqueue_reading(self, shape: RoundShape) -> None:
        if not self.branches(shape.draft_len):  # verified as a chain
            super().enqueue_reading(shape)
            return
        target, steps, batch = self._target, self._steps, shape.batch
        assert steps.trees is not None, "of `make_trees`"
        depth, limits = self._shape.levels(shape.draft_len), target.program.limits
        described = target.program.step, self._steps_of[EAGLE_EXTEND], limits, self._sources
        read = steps.state, self._pairs, steps.trees, *described, batch, shape.draft_len, depth
        steps.launch(target, [pairs_kernel.read_path(*read)])
        rows = self._sources[: batch * (depth + 1)]
        for name, outputs in self._features.items():
            target.pass_chosen(EAGLE_EXTEND, name, outputs, rows)
        steps.attend(EAGLE_EXTEND, shape, depth + 1)
