"""Which sequences run in the next step, how much of each, and in which blocks. Integers only.

One `schedule()` accounts for generation first (one root token each), then context chunks, then
draft tokens; drafts shrink before context starves and before anybody is paused. Sequences start
in the order of arrival and nobody overtakes.
"""

from __future__ import annotations

from collections import deque

from llmctl.errors import BadConfig
from llmctl.runtime.admission import (
    CapacitySchedulerPolicy,
    Limits,
    SchedulerConfig,
    refuse_unservable,
)
from llmctl.runtime.chunking import (
    ContextChunkingPolicy,
    equal_progress_chunks,
    fair_shares,
    first_come_chunks,
    least_chunk,
)
from llmctl.runtime.core import Batch, FinishReason, Sequence, Slice
from llmctl.runtime.kv_cache import KvCacheManager, PrefixMatch

__all__ = ["CapacitySchedulerPolicy", "Limits", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Plans steps over one KV cache. Not thread-safe: the loop's thread owns it.

    Per step: `schedule()`, run the batch, commit tokens and lengths into its sequences, `update`.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KvCacheManager, limits: Limits) -> None:
        chunked = config.enable_chunked_context
        if chunked and limits.max_num_tokens < kv_cache.tokens_per_block:
            raise BadConfig(
                f"max_num_tokens is {limits.max_num_tokens}, less than one block of "
                f"{kv_cache.tokens_per_block} tokens, the smallest context chunk",
                fix="rebuild with a larger --max_num_tokens or a smaller --tokens_per_block",
            )
        self.config = config
        self.limits = limits
        self.num_paused = 0  # times a sequence was paused, ever
        self._kv_cache = kv_cache
        self._chunk_unit = kv_cache.tokens_per_block if chunked else None
        self._token_budget = limits.max_num_tokens
        self._is_static = config.capacity_scheduler_policy is CapacitySchedulerPolicy.STATIC_BATCH
        self._may_pause = (
            config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        )
        self._active: dict[int, Sequence] = {}  # in the order of their start
        self._waiting: deque[Sequence] = deque()
        self._refused_at = -1  # the cache version at which the head of the queue did not fit

    @property
    def active(self) -> tuple[Sequence, ...]:
        """Started sequences, in the order of their start."""
        return tuple(self._active.values())

    @property
    def num_active(self) -> int:
        """Started sequences."""
        return len(self._active)

    def is_active(self, sequence: Sequence) -> bool:
        """True from the start of a sequence until it is released or paused."""
        return sequence.sequence_id in self._active

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that hold no blocks, next to start first; paused ones are at the front."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        """True while any sequence is active or waiting."""
        return bool(self._active or self._waiting)

    def set_token_budget(self, num_tokens: int) -> None:
        """Let steps with context work hold at most num_tokens tokens from now on.

        Generation and its drafts are never cut for this; context keeps at least one block.
        """
        block = self._kv_cache.tokens_per_block
        if self._chunk_unit is None:
            raise BadConfig(
                "a token budget per step needs chunked context, which is off",
                fix="turn --enable_chunked_context on, or leave --max-step-ms out",
            )
        if not block <= num_tokens <= self.limits.max_num_tokens:
            raise BadConfig(
                f"the token budget is {num_tokens}; it must be from {block} (one block) to "
                f"{self.limits.max_num_tokens} (max_num_tokens)"
            )
        self._token_budget = num_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a fresh sequence, or refuse one that could never run to its end.

        Raises PromptTooLong (max_seq_len, or max_num_tokens without chunking) or OutOfMemory.
        """
        refuse_unservable(sequence, self.config, self.limits, self._kv_cache)
        self._waiting.append(sequence)

    def schedule(self) -> Batch:
        """The next step; empty only when there is no work. Blocks are reserved for all of it."""
        if self._may_pause:
            self._secure_progress()
        context: list[Sequence] = []
        generation: list[Sequence] = []
        for sequence in self._active.values():
            (context if sequence.is_context else generation).append(sequence)
        chunks: list[Slice] = []
        if context or self._waiting:
            budget = self._context_budget(context, generation)
            budget = self._admit(context, generation, budget)
            chunks = self._chunk(context, budget)
        num_tokens = sum(chunk.num_tokens for chunk in chunks) + len(generation)
        rounds = self._rounds(generation, self.limits.max_num_tokens - num_tokens)
        return Batch(tuple(chunks), tuple(rounds))

    def update(self, batch: Batch) -> None:
        """After the step: publish what it completed, release the sequences that finished."""
        active = self._active
        for slice_ in batch.slices:
            if slice_.sequence.sequence_id in active:  # else cancelled while the step ran
                self._kv_cache.publish(slice_.sequence)
        running = FinishReason.NOT_FINISHED
        for sequence in [s for s in active.values() if s.finish_reason is not running]:
            del active[sequence.sequence_id]
            self._kv_cache.release(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks at once; no effect on one that has ended.

        Safe while its step runs: freed blocks are not handed out before the next `schedule()`.
        """
        if self._active.pop(sequence.sequence_id, None) is not None:
            self._kv_cache.release(sequence)
            return
        self._waiting = deque(s for s in self._waiting if s.sequence_id != sequence.sequence_id)
        self._refused_at = -1

    # ---- starting and pausing ----

    def _admit(self, context: list[Sequence], generation: list[Sequence], budget: int) -> int:
        """Start waiting sequences while tokens and blocks last; returns the context budget left.

        Appends to `context` or `generation`: a resumed sequence whose blocks are all still cached
        goes straight to generation and takes its round from the budget.
        """
        if self._is_static and self._active:
            return budget
        demand = sum(self._demand(sequence) for sequence in context)
        while self._waiting and len(self._active) < self.limits.max_batch_size:
            head = self._waiting[0]
            least = least_chunk(0, len(head.tokens), self._chunk_unit)
            if demand + least > budget and not self._is_static:
                break
            if not self._try_start(head):
                break
            self._waiting.popleft()
            self._active[head.sequence_id] = head
            if head.is_context:
                context.append(head)
                demand += self._demand(head)
            else:
                generation.append(head)
                budget -= 1 + self._wanted_draft_len(head)
        return budget

    def _try_start(self, head: Sequence) -> bool:
        kv_cache = self._kv_cache
        if self._refused_at == kv_cache.version:
            return False
        match = kv_cache.lookup(head)
        if self._awaits_shared_block(head, match):
            return False
        promised = sum(
            max(0, self._goal_blocks(s) - len(s.block_table)) for s in self._active.values()
        )
        wanted = self._goal_blocks(head) - match.num_blocks_in_use
        if wanted > kv_cache.num_available_blocks - promised:
            self._refused_at = kv_cache.version
            return False
        kv_cache.attach(head, match)
        return True

    def _awaits_shared_block(self, head: Sequence, match: PrefixMatch) -> bool:
        """True while an active sequence computes the very block that `head` would compute first.

        So n returns of one prompt, or arrivals with one long prefix, compute it once.
        """
        size = self._kv_cache.tokens_per_block
        end = (match.full.depth + 1) * size
        if self._is_static or not self._kv_cache.enable_block_reuse or end >= len(head.tokens):
            return False
        block, prefix = head.tokens[end - size : end], head.tokens[:end]
        return any(
            sequence.kv_len < end
            and sequence.tokens[end - size : end] == block
            and sequence.tokens[:end] == prefix
            for sequence in self._active.values()
        )

    def _goal_blocks(self, sequence: Sequence) -> int:
        """Blocks to keep for a sequence before another may start.

        To its end; if pausing is allowed, to the end of its next round.
        """
        num_tokens = sequence.max_len - 1  # the last token never enters the cache
        if self._may_pause:
            num_tokens = min(num_tokens, len(sequence.tokens) + self.limits.max_draft_len)
        return self._kv_cache.num_blocks_for(num_tokens)

    def _secure_progress(self) -> None:
        """Reserve a root or least chunk for every active sequence, oldest first.

        Where blocks are short the latest started sequence is paused, so the oldest always runs.
        """
        for sequence in list(self._active.values()):
            if sequence.sequence_id not in self._active:
                break  # paused just now, like all that started after it
            start = sequence.kv_len
            end = start + least_chunk(start, len(sequence.tokens), self._chunk_unit)
            while not self._kv_cache.reserve(sequence, end):
                latest = next(reversed(self._active.values()))
                self._pause(latest)
                if latest is sequence:
                    break

    def _pause(self, sequence: Sequence) -> None:
        del self._active[sequence.sequence_id]
        self._kv_cache.release(sequence)
        self._waiting.appendleft(sequence)
        self.num_paused += 1

    # ---- sizing ----

    def _context_budget(self, context: list[Sequence], generation: list[Sequence]) -> int:
        """Tokens for context after generation roots and drafts; drafts yield if it starves."""
        first = context[0] if context else self._waiting[0]
        least = least_chunk(first.kv_len, len(first.tokens), self._chunk_unit)
        num_drafts = sum(self._wanted_draft_len(sequence) for sequence in generation)
        free = self.limits.max_num_tokens - len(generation)
        budget = free - num_drafts
        if budget < least <= free:
            budget = least
        tuned = self._token_budget - len(generation) - num_drafts
        return max(0, min(budget, max(least, tuned)))

    def _demand(self, sequence: Sequence) -> int:
        """Context tokens a started sequence takes before the next one gets any."""
        start, end = sequence.kv_len, len(sequence.tokens)
        if self._takes_turns:
            return least_chunk(start, end, self._chunk_unit)
        return end - start

    @property
    def _takes_turns(self) -> bool:
        policy = self.config.context_chunking_policy
        return policy is ContextChunkingPolicy.EQUAL_PROGRESS and self._chunk_unit is not None

    def _chunk(self, context: list[Sequence], budget: int) -> list[Slice]:
        spans = [(sequence.kv_len, len(sequence.tokens)) for sequence in context]
        unit = self._chunk_unit
        if self._takes_turns and unit is not None:
            sizes = equal_progress_chunks(spans, budget, unit)
        else:
            sizes = first_come_chunks(spans, budget, unit)
        chunks = []
        for sequence, (start, _), size in zip(context, spans, sizes, strict=True):
            num_tokens = size
            if not self._kv_cache.reserve(sequence, start + size):
                assert self._may_pause and unit is not None, "a sequence outgrew its reservation"
                num_tokens = self._kv_cache.max_reservable_tokens(sequence) - start
                self._kv_cache.reserve(sequence, start + num_tokens)
            if num_tokens:
                chunks.append(Slice(sequence, start, num_tokens))
        return chunks

    def _wanted_draft_len(self, sequence: Sequence) -> int:
        # A round emits accepted + 1 tokens, so a draft beyond the last but one is never used.
        return min(self.limits.max_draft_len, sequence.max_len - len(sequence.tokens) - 1)

    def _rounds(self, generation: list[Sequence], num_drafts: int) -> list[Slice]:
        draft_lens = [self._wanted_draft_len(sequence) for sequence in generation]
        if sum(draft_lens) > num_drafts:
            draft_lens = fair_shares(draft_lens, num_drafts)
        rounds = []
        for sequence, draft_len in zip(generation, draft_lens, strict=True):
            num_tokens = len(sequence.tokens)
            if not self._kv_cache.reserve(sequence, num_tokens + draft_len):
                assert self._may_pause, "a sequence outgrew its reservation"
                draft_len = self._kv_cache.max_reservable_tokens(sequence) - num_tokens
                self._kv_cache.reserve(sequence, num_tokens + draft_len)
            rounds.append(Slice(sequence, num_tokens - 1, 1, draft_len))
        return rounds
