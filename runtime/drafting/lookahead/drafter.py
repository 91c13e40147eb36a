"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): guesses come from the target itself.

One step verifies n-grams that followed the last token before (pool.py) and moves a window of
guesses one iteration on (window.py). Every column of the window makes an n-gram for the pool.
Sampled requests guess with the noise that the target will use at the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.lookahead.pool import NgramPool
from llmctl.runtime.drafting.lookahead.tree import Planned, plan
from llmctl.runtime.drafting.lookahead.window import Window
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager
from llmctl.runtime.request import Batch, FinishReason, Request, Sequence


class Lookahead:
    """Window and pool of one sequence."""

    def __init__(self, config: LookaheadDecodingConfig, sequence: Sequence) -> None:
        self.config = config
        self.window = Window(config, sequence.tokens, sequence.request.end_id)
        self.pool = NgramPool(config.ngram_size, config.verification_set_size)

    def follow(self, tokens: Items[int]) -> None:
        """The sequence has these tokens, whoever wrote them."""
        self.window.follow(len(tokens) - 1)
        self.pool.read(tokens)

    def propose(self, tokens: Items[int], room: int) -> Planned:
        """The drafts of the next step of a sequence with these tokens."""
        self.follow(tokens)
        return plan(self.window, self.pool.after(tokens[-1]), room)

    def learn(self, tokens: Items[int], ends: Items[int | None], drawn: Items[int]) -> None:
        """That step is over: the sequence has `tokens`, and the target drew `drawn` [1 + drafts]
        behind the root and every draft; negative where it had no logits to draw from."""
        window = self.window
        found = [-1 if end is None else drawn[end - ROOT] for end in ends]
        new = [None if token < 0 else token for token in found]
        if window.is_full:
            for token, ngram in window.ngrams(tokens[window.position], new):
                self.pool.add(token, ngram)
        window.advance(new, len(tokens) - 1)


class LookaheadDrafter:
    """A window and a pool for every sequence; a request may have smaller ones than `config`."""

    holders: Mapping[str, BlockHolder] = MappingProxyType({})

    def __init__(self, config: LookaheadDecodingConfig, max_draft_len: int) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = min(max_draft_len, config.max_draft_len)
        self.config = config
        self._states: dict[int, Lookahead] = {}  # by sequence id
        # of the step under way; None: without drafts
        self._planned: list[Planned | None] = []

    def check(self, request: Request) -> None:
        """See Drafter. Raises BadConfig for sizes larger than the executor's."""
        asked = request.lookahead_config
        if asked is not None and not self.config.has_room_for(asked):
            raise BadConfig(
                f"lookahead_config is [{asked}]; the executor's is [{self.config}], and no size "
                "of a request may be larger",
                fix="a smaller one, or open the engine with a larger --lookahead-config",
            )

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Nothing to prepare: trees are accepted by tokens."""

    def propose(self, batch: Batch) -> list[Drafts]:
        """Trees for all that have room."""
        self._planned = []
        for item in batch.generation:
            sequence = item.sequence
            most = min(self.max_draft_len, self.config_of(sequence).max_draft_len)
            room = min(item.draft_len, most)
            planned = None
            if room:
                planned = self.state_of(sequence).propose(sequence.tokens, room)
            self._planned.append(planned)
        return [Drafts() if planned is None else planned.drafts for planned in self._planned]

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Windows and pools take in what the target drew."""
        all_planned, self._planned = self._planned, []
        counts = [1 + (0 if own is None else len(own.drafts.tokens)) for own in all_planned]
        first = len(drawn) - sum(counts)
        for item, planned, count in zip(batch.generation, all_planned, counts, strict=True):
            sequence = item.sequence
            if planned is not None and sequence.finish_reason is FinishReason.NOT_FINISHED:
                state = self._states[sequence.sequence_id]
                state.learn(sequence.tokens, planned.ends, drawn[first : first + count])
            first += count

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's window and pool."""
        self._states.pop(sequence.sequence_id, None)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._states

    def config_of(self, sequence: Sequence) -> LookaheadDecodingConfig:
        """The sizes of a sequence."""
        return sequence.request.lookahead_config or self.config

    def state_of(self, sequence: Sequence) -> Lookahead:
        """Window and pool of a sequence, made if it has none."""
        state = self._states.get(sequence.sequence_id)
        if state is None:
            state = Lookahead(self.config_of(sequence), sequence)
            self._states[sequence.sequence_id] = state
        return state
