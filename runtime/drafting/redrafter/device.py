"""A recurrent head in device rounds: a round begins with a beam search, step after step of the
head, on the rows of the round before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

import torch

from llmctl.builder.engine_format import REDRAFTER_FIRST, REDRAFTER_NEXT
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.beam_search import kernel
from llmctl.runtime.drafting.device_rows import DeviceRows
from llmctl.runtime.drafting.drafter import Described
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.redrafter.drafter import BeamShape
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.engines.opening import TARGET
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import DeviceSteps, RoundShape


class DeviceReDrafter(DeviceRows):
    """See FollowedDrafter. Every step of the search writes tokens and rows where the head's next
    step reads them; the last one's beams become the trees of the round.

    built: the beams that the engine's kernels are for; `shape` may have shorter ones.
    """

    def __init__(
        self,
        target: CudaEngine,
        built: BeamShape,
        shape: BeamShape,
        draft_len: int,
        rows: HiddenRows,
    ) -> None:
        assert built.num_beams == shape.num_beams and shape.length <= built.length
        super().__init__(target, rows)
        self.draft_len = min(draft_len, shape.num_drafts)
        self.built, self.shape = built, shape
        graphs = (REDRAFTER_FIRST, REDRAFTER_NEXT)
        self._logits = {graph: target.head_output(graph, "logits") for graph in graphs}
        self._shared = {graph: target.shared_logits(graph, ["logits"]) for graph in graphs}

    def describe(self) -> Described:
        own = {"built": astuple(self.built), "shape": astuple(self.shape)}
        return {"method": RecurrentDrafting.name, **own, "draft_len": self.draft_len}

    @classmethod
    def follow(cls, described: Described, engines: Mapping[str, CudaEngine]) -> DeviceReDrafter:
        """Of what another `describe`s."""
        built, shape = (BeamShape(*described[name]) for name in ("built", "shape"))
        return cls(engines[TARGET], built, shape, described["draft_len"], HiddenRows())

    def make_trees(
        self, max_batch_size: int, max_draft_len: int, device: torch.device | str
    ) -> DraftTrees:
        """Trees that every search makes anew."""
        self._first = self._target.prepare_head(REDRAFTER_FIRST)
        self._next = self._target.prepare_head(REDRAFTER_NEXT)
        return DraftTrees.allocate(max_batch_size, max_draft_len, device, self._first.logit_rows)

    def bind(self, steps: DeviceSteps) -> None:
        """See DeviceDrafter, as for all that follow."""
        super().bind(steps)
        shared = self._shared[REDRAFTER_NEXT]
        self._beams = kernel.BeamArrays.allocate(
            steps.state.max_batch_size,
            self.built.num_beams,
            self.built.length,
            self._target.vocab_size,
            self._target.queue.device,
            None if shared is None else shared.num_chunks,
        )

    def branches(self, draft_len: int) -> bool:
        return draft_len > 1 and self.shape.num_beams > 1

    def depth(self, draft_len: int) -> int:
        return min(draft_len, self.shape.length)

    def can_draft(self, sequence: Sequence) -> bool:
        is_asked = sequence.request.sampling_config.is_greedy or not self.shape.for_greedy
        return is_asked and super().can_draft(sequence)

    def enqueue_drafts(self, shape: RoundShape) -> None:
        target, state, trees = self._target, self._steps.state, self._steps.trees
        assert trees is not None, "of `make_trees`"
        length, requests = self.depth(shape.draft_len), shape.batch
        self._first.token_ids[:requests].copy_(state.root[:requests])
        graph, rows = REDRAFTER_FIRST, requests
        for step in range(length):
            if step:
                target.hand_on(graph, REDRAFTER_NEXT, rows)
                graph, rows = REDRAFTER_NEXT, requests * self.shape.num_beams
            is_shared = self._shared[graph] is not None
            target.enqueue_head(graph, rows, reads_tokens=True, are_listed=is_shared)
            launches = [
                self._offer(graph, rows),
                kernel.select(
                    self._beams, requests, step, self._next.token_ids, self._next.logit_rows
                ),
            ]
            self._steps.launch(target, launches)
        merged = kernel.merge(
            self._beams, requests, length, state.drafts, trees.parents, trees.counts
        )
        self._steps.launch(target, [merged])

    def _offer(self, graph: str, rows: int) -> Launch:
        """What each row has to offer; ranks list it together where they have shares of it."""
        beams, shared = self._beams, self._shared[graph]
        if shared is None:
            return kernel.offer(self._logits[graph], beams, rows)
        return self._target.program.offers(shared, beams.keys, beams.sums, rows, beams.num_beams)
