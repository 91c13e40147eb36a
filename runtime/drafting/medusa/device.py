"""Medusa heads in device rounds: a round begins with the heads, on the rows of the one before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import torch

from llmctl.builder.engine_format import MEDUSA_GRAPH, TOP_K, MedusaTree, medusa_logits
from llmctl.plugins.device_loop import tree_kernel
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.runtime.drafting.device_rows import DeviceRows
from llmctl.runtime.drafting.drafter import Described
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.static_nodes import listed_nodes
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.opening import TARGET
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape

assert TOP_K <= tree_kernel.MOST_RANKS


class DeviceMedusa(DeviceRows):
    """See FollowedDrafter."""

    def __init__(
        self, target: CudaEngine, tree: MedusaTree, draft_len: int, rows: HiddenRows
    ) -> None:
        super().__init__(target, rows)
        self.tree, self.draft_len = tree, min(draft_len, tree.num_nodes)
        self._nodes = cache(partial(listed_nodes, tree))
        self._num_heads = self._nodes(self.draft_len).depth

    def describe(self) -> Described:
        own = {"tree": self.tree.paths, "draft_len": self.draft_len}
        return {"method": Medusa.name, **own}

    @classmethod
    def follow(cls, described: Described, engines: Mapping[str, CudaEngine]) -> DeviceMedusa:
        """Of what another `describe`s."""
        tree = MedusaTree(tuple(map(tuple, described["tree"])))
        return cls(engines[TARGET], tree, described["draft_len"], HiddenRows())

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
        super().bind(steps)
        nodes, device = self._nodes(self.draft_len), self._target.queue.device
        heads, ranks = (
            torch.tensor(numbers, dtype=torch.int32).to(device)
            for numbers in (nodes.heads, nodes.ranks)
        )
        self._static = tree_kernel.StaticNodes(heads, ranks)
        self._num_ranks = 1 + max(nodes.ranks)
        names = list(map(medusa_logits, range(self._num_heads)))
        self._logits = tree_kernel.HeadLogits.of(
            [self._target.head_output(MEDUSA_GRAPH, name) for name in names]
        )
        self._shared = self._target.shared_logits(MEDUSA_GRAPH, names)
        whole = tree_kernel.num_chunks(self._target.vocab_size)
        self._chunks = whole if self._shared is None else self._shared.num_chunks
        size = tree_kernel.num_keys(steps.state.max_batch_size, self._chunks, self._num_ranks)
        self._keys = torch.zeros((self._num_heads, size), dtype=torch.int64, device=device)

    def branches(self, draft_len: int) -> bool:
        return draft_len > 0 and not self._nodes(draft_len).is_chain

    def depth(self, draft_len: int) -> int:
        return self._nodes(draft_len).depth

    def enqueue_drafts(self, shape: RoundShape) -> None:
        target, batch, count = self._target, shape.batch, self._num_ranks
        target.enqueue_head(MEDUSA_GRAPH, batch, are_listed=self._shared is not None)
        state, sizes = self._steps.state, (shape.draft_len, count, target.vocab_size, self._chunks)
        if self._shared is None:
            listed = tree_kernel.list_top(self._logits, self._keys, batch, count)
        else:
            listed = target.program.offers(self._shared, self._keys, None, batch, count)
        launches = [
            listed,
            tree_kernel.fill_tree(self._keys, self._static, state, batch, *sizes),
        ]
        self._steps.launch(target, launches)
