"""Drafts from a second, smaller engine.

The draft engine's KV cache uses the target's block ids. In a round the draft engine reads every
committed token it has not seen (only the root; the root and the last draft after a full acceptance;
or more after rounds without drafts), then each draft that another follows:

    tokens   ... t  t  r | d1 d2 d3 d4        c = committed tokens, r = tokens[c - 1]
    fed            [t  r]  d1 d2 d3           valid afterwards: c + 3 entries, d4's is missing

After `a` accepted drafts the first min(c + a, c + 3) entries stay valid. Of a tree, those of the
accepted path that are elsewhere are moved there, as the target's are. Context slices are read in
the same chunks as by the target, without logits.

With acceptance by tokens, sampled requests draw drafts with the noise that the target will use at
the same positions, so the two are likely to pick the same token. With acceptance by logits, drafts
have their own random stream and their distributions are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from llmctl.errors import BadConfig, PairMismatch
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.feeding import cut, unread
from llmctl.runtime.drafting.draft_engine.levels import EngineLevels
from llmctl.runtime.drafting.draft_engine.method import ROLE
from llmctl.runtime.drafting.drafter import WithoutWindow
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.drafting.growth.grower import Grower
from llmctl.runtime.drafting.growth.growth import Growth, Plant
from llmctl.runtime.drafting.hidden_rows import end_of
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import BlockHolder, KvCacheManager, Move
from llmctl.runtime.request import Batch, Sequence
from llmctl.runtime.step import Span, StepRunner, pack, slots_of


class _Round(NamedTuple):
    """One sequence's drafts, between propose and commit."""

    num_committed: int  # c, when the round began
    growth: Growth
    drafts: Drafts


class DraftEngineDrafter(WithoutWindow):
    """Runs a draft engine for all generation sequences together, up to `max_draft_len` steps of
    chains, or as many as the trees of `plant` are deep."""

    def __init__(self, draft: StepRunner, max_draft_len: int, plant: Plant | None = None) -> None:
        if max_draft_len < 1:
            raise BadConfig(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self.max_draft_len = max_draft_len
        self._draft = draft
        self._plant = plant
        self.holders: Mapping[str, BlockHolder] = {ROLE: draft}
        self._rounds: dict[int, _Round] = {}  # by sequence id, between propose and commit

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        """Allocate the draft's cache; see Drafter.prepare. Raises PairMismatch."""
        if self._draft.tokens_per_block != kv_cache.tokens_per_block:
            raise PairMismatch(
                f"the draft engine has {self._draft.tokens_per_block} tokens per KV block, "
                f"the target engine {kv_cache.tokens_per_block}; they share block ids",
                fix="rebuild one of them with the other's --tokens_per_block",
            )
        if self._draft.context_group and not kv_cache.context_group:
            raise PairMismatch(
                f"the draft engine reads prompts with FP8 products, {self._draft.context_group} "
                "tokens at a time; the target engine has no prompts in groups for it",
                fix="rebuild the draft with --use_fp8_context_fmha disable, or with "
                "--use_fp8_generation_fmha enable, too",
            )
        self._draft.allocate_kv_cache(kv_cache.num_blocks)
        if kv_cache.num_host_blocks:
            self._draft.allocate_host_blocks(kv_cache.num_host_blocks)
        self._levels = EngineLevels(self._draft, sampler.vocab_size)
        self._grower = Grower(self._levels, sampler, self._plant, keep_probs=keep_probs)

    def propose(self, batch: Batch) -> list[Drafts]:
        """Feed what is missing, then draft step by step, all sequences together."""
        self._rounds = {}
        limit = self._draft.max_seq_len
        spans = []
        for item in batch.context:
            end = min(item.start + item.num_tokens, limit)
            spans.append(unread(self._draft, item.sequence, end))
        growths: dict[int, Growth] = {}
        for item in batch.generation:
            sequence, committed = item.sequence, len(item.sequence.tokens)
            # The last draft is not read, so it may be one past the draft engine's last position.
            wanted = min(item.draft_len, self.max_draft_len, limit - committed + 1)
            if wanted > 0:
                growths[sequence.sequence_id] = self._grower.start(sequence, 0, wanted)
                spans.append(unread(self._draft, sequence, committed, needs_logits=True))
        self._feed(spans, growths)
        self._grower.grow(list(growths.values()))
        for sequence_id, own in growths.items():
            self._rounds[sequence_id] = _Round(len(own.sequence.tokens), own, own.drafts())
        rounds = (self._rounds.get(item.sequence.sequence_id) for item in batch.generation)
        return [Drafts() if done is None else done.drafts for done in rounds]

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        """Rewind each sequence's draft cache to what the target confirmed."""
        moves: list[list[Move]] = []
        for item, num_accepted in zip(batch.generation, accepted, strict=True):
            sequence = item.sequence
            done = self._rounds.pop(sequence.sequence_id, None)
            if done is None:
                continue
            tokens, committed = sequence.tokens, done.num_committed
            last = end_of(done.drafts, tokens[committed : committed + num_accepted])
            places = done.growth.places(done.drafts.path_to(last))
            valid = min(committed + len(places), len(tokens) - 1)
            sequence.kv_lens[DRAFT_GROUP] = valid
            root = committed - 1
            own = [
                (root + place, root + depth)
                for depth, place in enumerate(places[: valid - committed], 1)
                if place != depth
            ]
            if own and sequence.block_table:
                moves.append(slots_of(sequence.block_table, own, self._draft.tokens_per_block))
        if moves:
            self._draft.compact(moves)

    def release(self, sequence: Sequence) -> None:
        """Forget an unfinished round."""
        self._rounds.pop(sequence.sequence_id, None)

    def _feed(self, spans: list[Span], growths: Mapping[int, Growth]) -> None:
        """Bring the draft's cache up to date; sequences in a round get their first drafts."""
        for call in cut(spans, self._draft):
            self._levels.run(pack(call, self._draft.tokens_per_block))
            for span in call:
                span.sequence.kv_lens[DRAFT_GROUP] = span.end
            ready = [growths[s.sequence.sequence_id] for s in call if s.needs_logits]
            if ready:
                self._grower.offer(ready, [[row] for row in range(len(ready))])
