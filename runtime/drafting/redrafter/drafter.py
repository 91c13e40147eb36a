"""Drafts from a recurrent head that starts from the target's last hidden state.

Every round searches beams anew, from the row that gave the target's own token (hidden_rows.py), so
nothing is kept between rounds but which row that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from types import MappingProxyType

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.hidden_rows import HiddenRows
from llmctl.runtime.drafting.length.confidence import Confidence
from llmctl.runtime.drafting.redrafter.beams import Bounds
from llmctl.runtime.drafting.redrafter.packing import Found
from llmctl.runtime.drafting.redrafter.search import Asked, Searcher
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, FinishReason, Sequence, Slice


@dataclass(frozen=True, slots=True)
class BeamShape:
    """How beams are searched. for_greedy: requests that are sampled draft nothing."""

    num_beams: int
    length: int  # drafts of a beam
    for_greedy: bool = False

    @property
    def num_drafts(self) -> int:
        """The most drafts of a round, if no two beams begin alike."""
        return self.num_beams * self.length


class ReDrafter(WithoutWindow):
    """Searches beams for all requests at once and merges those of each into a tree. A request with
    room for fewer drafts has shorter beams, and as many of their tokens as there is room for."""

    holders: Mapping[str, BlockHolder] = MappingProxyType({})

    def __init__(self, searcher: Searcher, shape: BeamShape, max_draft_len: int) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = min(max_draft_len, shape.num_drafts)
        self._searcher = searcher
        self._shape = shape
        self.confidence = Confidence(can_branch=shape.num_beams > 1)
        self.rows = HiddenRows()

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare: trees are accepted by tokens."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Trees for all that have a row and room, in one search."""
        rows = self.rows.take()
        drafts = [Drafts()] * len(batch.generation)
        asked = [
            (place, rows[item.sequence.sequence_id], item)
            for place, item in enumerate(batch.generation)
            if item.draft_len and item.sequence.sequence_id in rows and self._drafts_for(item)
        ]
        found: list[Found] = []
        if asked:
            found = self._searcher.search(
                [self._ask(row, item.sequence, item.draft_len) for _, row, item in asked],
                self._num_beams,
                self._bounds,
            )
            for (place, _, _), own in zip(asked, found, strict=True):
                drafts[place] = own.drafts
        else:
            self._searcher.drop()
        num_steps = self._searcher.num_steps if asked else 0
        is_chain = self.confidence.is_chain
        num_first = 0 if is_chain else sum(own.drafts.num_first for own in found)
        self.confidence.note(num_steps, [own.scores for own in found], num_first)
        self.rows.start(batch, drafts)
        return drafts

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Note the row of each sequence's last accepted token. If the next step is as this one, its
        drafts can be sought from now on."""
        self.rows.commit(accepted)
        if batch.context:
            return
        likely = []
        for item in batch.generation:
            sequence = item.sequence
            goes_on = sequence.finish_reason is FinishReason.NOT_FINISHED
            room = min(item.draft_len, sequence.max_len - len(sequence.tokens) - 1)
            if goes_on and room > 0 and self._drafts_for(item):
                likely.append(self._ask(self.rows.row_of(sequence), sequence, room))
        if likely:
            self._searcher.begin(likely, self._num_beams, self._bounds)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's row."""
        self.rows.forget(sequence)

    @property
    def _num_beams(self) -> int:
        return 1 if self.confidence.is_chain else self._shape.num_beams

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self.confidence.least_kept, self.confidence.least_continued)

    def _ask(self, row: int, sequence: Sequence, draft_len: int) -> Asked:
        room = min(draft_len, self.max_draft_len)
        return Asked(row, sequence.tokens[-1], min(room, self._shape.length), room)

    def _drafts_for(self, item: Slice) -> bool:
        request = item.sequence.request
        return request.sampling_config.is_greedy or not self._shape.for_greedy
