"""Medusa heads in device rounds: a round begins with the heads, on the rows of the one before."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import cache, partial

import numpy as np
import torch

from llmctl.builder.engine_format import MEDUSA_GRAPH, TOP_K, MedusaTree, medusa_logits
from llmctl.plugins.backends.cuda.queue import device_errors
from llmctl.plugins.device_loop import tree_kernel
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.nodes import listed_nodes
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape

assert TOP_K <= tree_kernel.MOST_RANKS


class DeviceMedusa:
    """See DeviceDrafter. Acceptance on the device says which hidden row the heads read next, where
    their graph finds it; a round that follows a step of the host's gets the rows from `rows`."""

    engines = ()
    max_requests: int | None = None
    falls_behind = False

    def __init__(
        self, target: CudaEngine, tree: MedusaTree, draft_len: int, rows: HiddenRows
    ) -> None:
        self.draft_len = min(draft_len, tree.num_nodes)
        self._target = target
        self._rows = rows
        self._nodes = cache(partial(listed_nodes, tree))
        self._num_heads = self._nodes(self.draft_len).depth
        self._sequences: list[Sequence] = []

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees:
        """The static tree for every request."""
        nodes = self._nodes(self.draft_len)
        step = self._target.prepare_head(MEDUSA_GRAPH)
        trees = DraftTrees.allocate(max_batch_size, max_draft_len, device, step.logit_rows)
        parents = torch.tensor(nodes.parents, dtype=torch.int32) + 1
        trees.parents[:, : self.draft_len] = parents.to(trees.parents.device)
        trees.counts.fill_(self.draft_len)
        return trees

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        self._steps = steps
        nodes, device = self._nodes(self.draft_len), self._target.queue.device
        heads, ranks = (
            torch.tensor(numbers, dtype=torch.int32).to(device)
            for numbers in (nodes.heads, nodes.ranks)
        )
        self._static = tree_kernel.StaticNodes(heads, ranks)
        self._num_ranks = 1 + max(nodes.ranks)
        size = tree_kernel.num_keys(
            steps.state.max_batch_size, self._target.vocab_size, self._num_ranks
        )
        self._keys = torch.zeros((self._num_heads, size), dtype=torch.int64, device=device)
        names = map(medusa_logits, range(self._num_heads))
        self._logits = tree_kernel.HeadLogits.of(
            [self._target.head_output(MEDUSA_GRAPH, name) for name in names]
        )

    def prepare(self) -> None:
        """Nothing is read in advance."""

    def branches(self, draft_len: int) -> bool:
        return draft_len > 0 and not self._nodes(draft_len).is_chain

    def depth(self, draft_len: int) -> int:
        return self._nodes(draft_len).depth

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    def begin(self, sequences: Items[Sequence]) -> None:
        self._sequences = list(sequences)
        trees, queue = self._steps.trees, self._target.queue
        assert trees is not None
        known = self._rows.take()  # those of sequences that are left out are overwritten
        rows = np.zeros(self._steps.state.max_batch_size, np.int32)
        rows[: len(sequences)] = [known[sequence.sequence_id] for sequence in sequences]
        with device_errors("writing the rows of heads"), queue.scope():
            trees.rows[: len(rows)].copy_(queue.to_device(torch.from_numpy(rows)))

    def end(self, nodes: Items[int], draft_len: int) -> None:
        for index, (sequence, node) in enumerate(zip(self._sequences, nodes, strict=True)):
            self._rows.note(sequence, index * (draft_len + 1) + node)

    def is_behind(self, sequence: Sequence) -> bool:
        return False

    def catch_up(self, sequences: Items[Sequence]) -> None:
        """There is no cache."""

    def enqueue_drafts(self, shape: RoundShape) -> None:
        target, batch, count = self._target, shape.batch, self._num_ranks
        target.enqueue_head(MEDUSA_GRAPH, batch)
        state, sizes = self._steps.state, (shape.draft_len, count, target.vocab_size)
        launches = [
            tree_kernel.list_top(self._logits, self._keys, batch, count),
            tree_kernel.fill_tree(self._keys, self._static, state, batch, *sizes),
        ]
        self._steps.launch(target, launches)

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        """There is no cache."""
