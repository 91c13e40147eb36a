"""A draft engine in device rounds: each step reads the token drawn by the previous step."""

from __future__ import annotations

from collections.abc import Mapping

from llmctl.plugins.device_loop import kernel as bookkeeping
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.fed import FedDraftEngine
from llmctl.runtime.drafting.draft_engine.method import ROLE, DraftEngine
from llmctl.runtime.drafting.drafter import Described, DeviceChains, OnEveryRank
from llmctl.runtime.engines.cuda_engine import CudaEngine
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.device_steps import RoundShape
from llmctl.runtime.rounds.upload import Drawing
from llmctl.runtime.rounds.verification import MOST_FED


class DeviceDraftEngine(FedDraftEngine, DeviceChains, OnEveryRank):
    """See FollowedDrafter."""

    def __init__(self, draft: CudaEngine, draft_len: int) -> None:
        super().__init__(draft, draft_len, MOST_FED)

    def describe(self) -> Described:
        return {"method": DraftEngine.name, "draft_len": self.draft_len}

    @classmethod
    def follow(cls, described: Described, engines: Mapping[str, CudaEngine]) -> DeviceDraftEngine:
        """Of what another `describe`s."""
        return cls(engines[ROLE], described["draft_len"])

    def enqueue_drafts(self, shape: RoundShape) -> None:
        steps, draft = self._steps, self._draft
        batch, last = shape.batch, shape.draft_len - 1
        for index in range(shape.draft_len):
            self._feed(shape, index)
            count = MOST_FED if index == 0 else 1
            is_drawn = index == last or not self._draws_in_feeding(shape)
            steps.forward(draft, shape, count, batch, is_drawn=is_drawn)
            if not is_drawn:
                continue
            drafts, stride = steps.state.drafts, steps.state.max_draft_len
            steps.draw(draft, drafts, shape, batch, first=index, stride=stride, offset=index)

    def note(self, sequence: Sequence, committed: int, accepted: int, draft_len: int) -> None:
        # The last draft was never fed to the draft engine.
        valid = committed + min(accepted, draft_len - 1)
        sequence.kv_lens[DRAFT_GROUP] = min(valid, len(sequence.tokens) - 1)

    def _feed(self, shape: RoundShape, index: int) -> None:
        """Prepare the draft's step `index`, and perhaps draw the token that it reads."""
        steps, program = self._steps, self._draft.program
        described = steps.state, program.step, program.limits, shape.batch
        if index == 0:
            first = bookkeeping.draft_first(*described, only_chains=steps.trees is None)
            steps.launch(steps.target, [first])
        elif self._draws_in_feeding(shape):
            scratch = steps.scratch(self._draft)
            drawn = bookkeeping.draw_next(self._draft.logits, scratch, *described, index)
            steps.launch(self._draft, [drawn])
        else:
            steps.launch(steps.target, [bookkeeping.draft_next(*described, index)])

    def _draws_in_feeding(self, shape: RoundShape) -> bool:
        """Whether one launch draws a draft and prepares the step that reads it: greedy ones, of
        logits that are in one place."""
        return shape.drawing is Drawing.GREEDY and not self._draft.shares_logits
