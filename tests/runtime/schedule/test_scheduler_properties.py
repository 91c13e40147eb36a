"""Random traffic through scheduler and KV cache, against a model of what the caches contain.

The model writes, for every slot, a hash of the whole token prefix that the slot's K/V depends on.
Before a step computes anything, each sequence reads all slots it relies on and must find exactly
its own prefix there, in the target's cache and in the draft's. After every step the same holds of
every block in the tree, on the device and in host memory: it has committed tokens only.
"""

from __future__ import annotations

import random
from functools import partial

from hypothesis import given, settings
from support.cache_contents import RUNNING, VOCABULARY, Contents, drafted
from support.traffic import setups

from llmctl.plugins.ops.paged_attention.fp8_context import context_end
from llmctl.runtime.api.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from llmctl.runtime.kv_cache import CopyKind
from llmctl.runtime.request import FinishReason, Request, Sequence
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, Scheduler


class Traffic:
    """Drives one scheduler with random requests and random acceptance, checking every step."""

    def __init__(self, generator, config, cache, limits):
        self.random = generator
        self.config = config
        self.cache = cache
        self.limits = limits
        self.scheduler = Scheduler(config, cache, limits)
        self.target = Contents(cache.tokens_per_block)
        self.draft = Contents(cache.tokens_per_block)
        self.is_aside = cache._store.arrivals._is_on
        self.sequences = []
        self.started = []
        self.budget = limits.max_num_tokens
        self.stems = [[generator.randrange(VOCABULARY) for _ in range(60)] for _ in range(3)]

    def arrive(self):
        chance, limits, size = self.random, self.limits, self.cache.tokens_per_block
        longest = min(limits.max_seq_len, self.cache.num_usable_blocks * size + 1)
        if not self.config.enable_chunked_context:
            longest = min(longest, limits.max_num_tokens + 1)
        num_prompt_tokens = chance.randint(1, chance.choice([longest - 1, min(6, longest - 1)]))
        stem = chance.choice(self.stems)[: chance.randint(0, num_prompt_tokens)]
        rest = num_prompt_tokens - len(stem)
        tokens = stem + [chance.randrange(VOCABULARY) for _ in range(rest)]
        longest_output = longest - num_prompt_tokens
        max_tokens = chance.choice([longest_output, chance.randint(1, longest_output)])
        sequence = Sequence(
            sequence_id=len(self.sequences),
            request_id=len(self.sequences),
            request=Request(
                tuple(tokens),
                max_tokens=max_tokens,
                kv_cache_retention_config=self.retention(num_prompt_tokens),
            ),
            index=0,
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_len=num_prompt_tokens + max_tokens,
            context_end=context_end(num_prompt_tokens, self.cache.context_group),
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)

    def retention(self, num_prompt_tokens):
        chance = self.random
        if chance.random() < 0.6:
            return None
        first = chance.randrange(num_prompt_tokens)
        priority, decode_priority = chance.randint(0, 100), chance.randint(0, 100)
        prompt = TokenRangeRetentionConfig(first, None, priority, chance.choice([None, 5e3]))
        return KvCacheRetentionConfig((prompt,), decode_priority, chance.choice([None, 5e3]))

    def cancel_one(self):
        running = [s for s in self.sequences if s.finish_reason is RUNNING]
        if running:
            sequence = self.random.choice(running)
            self.scheduler.cancel(sequence)
            sequence.finish_reason = FinishReason.CANCELLED
            assert not sequence.block_table

    def step(self, cancel_inside):
        scheduler = self.scheduler
        batch = scheduler.schedule()
        self.cache.check_invariants()
        assert bool(batch.slices) == scheduler.has_work, "work waits but nothing runs"
        self.check_batch(batch)
        self.note_starts()
        self.copy_blocks()
        for part in batch.slices:  # all reads see the caches before anything is written
            self.check_contents(part)
        outcomes = [self.run(part) for part in batch.slices]
        if cancel_inside:
            self.cancel_one()
        for part, outcome in zip(batch.slices, outcomes, strict=True):
            if part.sequence.finish_reason is RUNNING:
                self.commit(part, *outcome)
        scheduler.update(batch)
        self.cache.check_invariants()
        store = self.cache._store
        self.target.check_tree(store.tree, [])
        if len(self.cache.groups) > 1:
            self.draft.check_tree(store.tree, store.copies, lambda node: node.groups >> 1)
        assert all(copy.kind is CopyKind.WITHIN for copy in store.copies)
        assert len(self.cache.groups) > 1 or not store.copies

    def copy_blocks(self):
        """In the order of the cache, in both engines; what comes from host memory may be late."""
        arrivals = self.cache.arrivals
        copies, batch = self.cache.pending_copies(), arrivals.hand_over()
        engines = (self.target, self.draft) if len(self.cache.groups) > 1 else (self.target,)
        for engine in engines:
            for copy in copies:
                engine.copy_block(copy, batch, self.is_aside)
        landed = batch if arrivals.take_wait() else batch - self.random.randint(0, 4)
        for engine in engines:
            engine.land(landed)
        if landed > 0:
            arrivals.note_arrived(landed)

    def check_contents(self, part):
        """Whatever a query of this step, or of any later one, can see."""
        sequence, window = part.sequence, self.cache.window
        if window is None or not self.cache.outgrows_window(sequence):
            self.target.check(sequence, part.start)
            self.draft.check(sequence, drafted(sequence))
            return

        def is_seen(oldest, position):
            return position >= oldest or position < window.sink_tokens

        starts = (part.start, drafted(sequence))
        kept = [partial(is_seen, window.oldest(start)) for start in starts]
        self.target.check(sequence, part.start, kept[0])
        if part.start - drafted(sequence) <= window.group_lag:
            self.draft.check(sequence, drafted(sequence), kept[1])
        most = self.cache.num_blocks_to_hold(sequence, sequence.max_len - 1)
        assert self.cache.num_held_blocks(sequence) <= most

    def run(self, part):
        """Write what the engines would write; (accepted drafts, emitted tokens)."""
        sequence, drafts = part.sequence, []
        accepted = self.random.randint(0, part.draft_len)
        emitted = [self.random.randrange(VOCABULARY) for _ in range(accepted + 1)]
        if part.draft_len:
            drafts = emitted[:accepted]
            drafts += [-1] * (part.draft_len - accepted)  # rejected: nobody may ever find it
        tokens = sequence.tokens + drafts
        end = part.start + part.num_tokens + part.draft_len
        self.refuse_shared_writes(sequence, part.start, end)
        self.target.write(sequence, tokens, part.start, end)
        if len(self.cache.groups) > 1 and (part.draft_len or self.random.random() < 0.5):
            # The last draft is never fed; a round without drafts may leave the draft behind.
            draft_end = max(part.start + part.num_tokens, end - 1)
            # Of the draft's part, what the target has computed is the same whoever writes it.
            self.refuse_shared_writes(sequence, part.start, draft_end)
            self.draft.write(sequence, tokens, drafted(sequence), draft_end)
            return accepted, emitted, draft_end
        return accepted, emitted, drafted(sequence)

    def refuse_shared_writes(self, writer, start, end):
        size = self.cache.tokens_per_block
        written = set(writer.block_table[start // size : -(-end // size)])
        written -= {self.cache._null_block}  # where a draft writes that lags too far behind
        for other in self.scheduler.active:
            assert other is writer or written.isdisjoint(other.block_table)

    def commit(self, part, accepted, emitted, draft_end):
        sequence = part.sequence
        sequence.kv_len = part.start + part.num_tokens + accepted
        if part.needs_logits:
            if self.random.random() < 0.1:  # a stop inside the accepted run
                emitted = emitted[: self.random.randint(1, len(emitted))]
                sequence.finish_reason = FinishReason.END_ID
            sequence.tokens += emitted
            assert len(sequence.tokens) <= sequence.max_len
            sequence.kv_len = min(sequence.kv_len, len(sequence.tokens) - 1)
            if sequence.finish_reason is RUNNING and len(sequence.tokens) == sequence.max_len:
                sequence.finish_reason = FinishReason.LENGTH
        if len(self.cache.groups) > 1:
            sequence.kv_lens[1] = min(draft_end, sequence.kv_len)

    def check_batch(self, batch):
        limits, size = self.limits, self.cache.tokens_per_block
        parts = batch.slices
        assert len({part.sequence.sequence_id for part in parts}) == len(parts)
        assert len(parts) <= limits.max_batch_size
        assert sum(part.num_tokens + part.draft_len for part in parts) <= limits.max_num_tokens
        num_context_tokens = sum(part.num_tokens for part in batch.context)
        others = sum(1 + part.draft_len for part in batch.generation)
        if num_context_tokens > max(size, self.cache.context_group):
            assert num_context_tokens + others <= self.budget
        for part in parts:
            sequence = part.sequence
            held = len(sequence.block_table) * size
            assert sequence.kv_len == part.start and part.num_tokens >= 1
            assert part.start + part.num_tokens + part.draft_len <= held
            assert drafted(sequence) <= sequence.kv_len
            if part.needs_logits:  # the last layer computes no tokens with FP8 products
                assert part.start + part.num_tokens > sequence.context_end
        for part in batch.context:
            assert part.sequence.is_context and part.draft_len == 0
            if not part.needs_logits:
                assert self.config.enable_chunked_context
                assert (part.start + part.num_tokens) % size == 0
            end = part.sequence.context_end
            for border in (part.start, part.start + part.num_tokens):
                assert border >= end or border % self.cache.context_group == 0
        for part in batch.generation:
            sequence = part.sequence
            assert sequence.kv_len == len(sequence.tokens) - 1 and part.needs_logits
            room = sequence.max_len - len(sequence.tokens) - 1
            assert 0 <= part.draft_len <= min(limits.max_draft_len, room)

    def note_starts(self):
        seen = set(self.started)
        self.started += [s.sequence_id for s in self.scheduler.active if s.sequence_id not in seen]

    def drain(self):
        """Run to the end; bounded, so a starving sequence fails the test."""
        for _ in range(3000):
            if not self.scheduler.has_work:
                return
            self.step(cancel_inside=False)
        raise AssertionError("a sequence starves")


@settings(max_examples=400)
@given(setups())
def test_random_traffic_keeps_every_promise(setup):
    config, cache, limits, seed = setup
    chance = random.Random(seed)
    traffic = Traffic(chance, config, cache, limits)
    for _ in range(40):
        for _ in range(chance.choice([0, 0, 1, 3])):
            traffic.arrive()
        if config.enable_chunked_context and chance.random() < 0.1:
            least = max(cache.tokens_per_block, cache.context_group)
            traffic.budget = chance.randint(least, limits.max_num_tokens)
            traffic.scheduler.set_token_budget(traffic.budget)
        if chance.random() < 0.1:
            traffic.cancel_one()
        traffic.step(cancel_inside=chance.random() < 0.05)
    traffic.drain()
    assert all(sequence.finish_reason is not RUNNING for sequence in traffic.sequences)
    assert all(not sequence.block_table for sequence in traffic.sequences)
    assert traffic.started == sorted(traffic.started), "somebody overtook"
    totals = cache.stats()
    assert totals.used_num_blocks == 0
    counts = [sequence.blocks for sequence in traffic.sequences]
    assert sum(item.num_reused for item in counts) == totals.reused_blocks
    assert sum(item.num_missed for item in counts) == totals.missed_blocks
    assert sum(item.num_reused_tokens for item in counts) == totals.reused_tokens
    if not cache.num_host_blocks:  # where what comes back takes a block, too
        assert sum(item.num_new for item in counts) == totals.alloc_new_blocks
    if config.capacity_scheduler_policy is not CapacitySchedulerPolicy.MAX_UTILIZATION:
        assert traffic.scheduler.num_paused == 0
