"""Which sequences run in the next step, how many tokens of each, in which blocks. Integers only.

`schedule()` plans generation first (one root token each), then prompt chunks, then draft tokens.
Drafts are reduced before prompts starve or a sequence is paused. Without chunked prefill,
generation waits one step for a prompt that fits only alone. `runtime.schedule.capacity` decides
which sequences may start, `runtime.schedule.waiting_queue` in which order.
"""

from __future__ import annotations

from llmctl.runtime.drafting.length.lengths import DraftLengths, FixedLengths
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Batch, FinishReason, Sequence, Slice
from llmctl.runtime.schedule.admission import (
    CapacitySchedulerPolicy,
    Limits,
    SchedulerConfig,
    refuse_small_steps,
    refuse_token_budget,
    refuse_unservable,
)
from llmctl.runtime.schedule.capacity import Capacity
from llmctl.runtime.schedule.chunked_prefill import (
    ContextChunkingPolicy,
    Cuts,
    equal_progress_chunks,
    fair_shares,
    first_come_chunks,
    least_chunk,
    unread,
)
from llmctl.runtime.schedule.waiting_queue import WaitingQueue

__all__ = ["CapacitySchedulerPolicy", "Limits", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Plans steps over one KV cache. Not thread-safe: the loop's thread owns it.

    Per step: `schedule()`, run the batch, commit tokens and lengths into its sequences, `update`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KvCacheManager,
        limits: Limits,
        draft_lengths: DraftLengths | None = None,
    ) -> None:
        cuts = Cuts(kv_cache.tokens_per_block, kv_cache.context_group)
        refuse_small_steps(config, limits, cuts)
        self.config = config
        self.limits = limits
        self.draft_lengths = draft_lengths or FixedLengths(limits.max_draft_len)
        self.num_paused = 0  # times a sequence was paused, ever
        self._kv_cache = kv_cache
        self._cuts = cuts if config.enable_chunked_context else None
        self._token_budget = limits.max_num_tokens
        self._capacity = Capacity(config, kv_cache, limits)
        self._active: dict[int, Sequence] = {}  # in the order of their start
        self._waiting = WaitingQueue()
        self._generation_waited = False  # in the last step, for a prompt that took all of it

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
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    @property
    def num_waiting_paused(self) -> int:
        """Of those, the ones that have run before."""
        return self._waiting.num_paused

    @property
    def has_work(self) -> bool:
        """True while any sequence is active or waiting."""
        return bool(self._active or self._waiting)

    @property
    def token_budget(self) -> int:
        """The most tokens of a step with context work."""
        return self._token_budget

    def set_token_budget(self, num_tokens: int) -> None:
        """Limit steps with context work to num_tokens tokens from now on.

        Generation and its drafts are never reduced for this; context work gets at least the
        smallest chunk.
        """
        refuse_token_budget(num_tokens, self.limits, self._cuts)
        self._token_budget = num_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a fresh sequence. One that could never run to its end raises PromptTooLong
        (max_seq_len, or max_num_tokens without chunking) or OutOfMemory."""
        refuse_unservable(sequence, self.config, self.limits, self._kv_cache)
        self._waiting.add(sequence)

    def schedule(self) -> Batch:
        """The next step; empty only when there is no work. Blocks are reserved for all of it.
        Sequences that wait for blocks from host memory are left out as long as others run."""
        batch = self._plan()
        if self._active and not batch.slices:
            self._kv_cache.arrivals.await_all()
            batch = self._plan()
        return batch

    def _plan(self) -> Batch:
        if self._capacity.may_pause:
            self._secure_progress()
        context, generation = list[Sequence](), list[Sequence]()
        is_late = self._kv_cache.is_arriving if len(self._kv_cache.arrivals) else None
        for sequence in self._active.values():
            if is_late is None or not is_late(sequence):
                (context if sequence.is_context else generation).append(sequence)
        self.draft_lengths.plan(generation)
        chunks, held = list[Slice](), list[Sequence]()
        if context or self._waiting:
            held = generation if self._must_run_alone(context, generation) else []
            beside = [] if held else generation
            budget = self._admit(context, beside, self._context_budget(context, beside))
            chunks = self._chunk(context, budget)
            generation = beside if chunks else held + beside
        self._generation_waited = bool(held and chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks) + len(generation)
        has_drafts = not chunks or self.draft_lengths.beside_prompts
        num_drafts = self.limits.max_num_tokens - num_tokens if has_drafts else 0
        rounds = self._rounds(generation, num_drafts)
        return Batch(tuple(chunks), tuple(rounds))

    def update(self, batch: Batch) -> None:
        """After the step: publish what it completed, release the sequences that finished."""
        active = self._active
        for slice_ in batch.slices:
            if slice_.sequence.sequence_id in active:  # else it was cancelled while the step ran
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
        self._waiting.discard(sequence)

    # ---- starting and pausing ----

    def _admit(self, context: list[Sequence], generation: list[Sequence], budget: int) -> int:
        """Start waiting sequences while tokens and blocks last; returns the context budget left.

        Appends to `context` or `generation`: a resumed sequence whose blocks are all still cached
        goes straight to generation and takes its round from the budget.
        """
        capacity = self._capacity
        if capacity.is_static and self._active:
            return budget
        capacity.begin()
        demand = sum(self._demand(sequence) for sequence in context)
        while self._waiting and len(self._active) < self.limits.max_active:
            head = self._waiting.head()
            least = least_chunk(unread(head, 0), self._cuts)
            if demand + least > budget and not capacity.is_static:
                break
            if not capacity.try_start(head, self._active.values()):
                break
            self._waiting.take(head)
            self._active[head.sequence_id] = head
            if self._kv_cache.is_arriving(head):
                continue
            if head.is_context:
                context.append(head)
                demand += self._demand(head)
            else:
                generation.append(head)
                budget -= 1 + self._wanted_draft_len(head)
        return budget

    def _secure_progress(self) -> None:
        """Reserve a root or smallest chunk for every active sequence, strongest claim first. If
        blocks run short, the weakest claim is paused, so the strongest always runs."""
        ranked = self._capacity.by_claim(self._active.values())
        for sequence in list(ranked):
            if sequence.sequence_id not in self._active:
                break  # just paused, like all with a weaker claim
            end = sequence.kv_len + least_chunk(unread(sequence), self._cuts)
            while not self._kv_cache.reserve(sequence, end):
                weakest = ranked.pop()
                self._pause(weakest)
                if weakest is sequence:
                    break

    def _pause(self, sequence: Sequence) -> None:
        del self._active[sequence.sequence_id]
        self._kv_cache.release(sequence)
        self._waiting.add_paused(sequence)
        self.num_paused += 1

    # ---- sizing ----

    def _context_budget(self, context: list[Sequence], generation: list[Sequence]) -> int:
        """Context tokens after generation roots and drafts; drafts are reduced if context would
        starve."""
        first = context[0] if context else self._waiting.head()
        least = least_chunk(unread(first), self._cuts)
        num_drafts = sum(self._wanted_draft_len(sequence) for sequence in generation)
        free = self.limits.max_num_tokens - len(generation)
        budget = free - num_drafts
        if budget < least <= free:
            budget = least
        tuned = self._token_budget - len(generation) - num_drafts
        return max(0, min(budget, max(least, tuned)))

    def _must_run_alone(self, context: list[Sequence], generation: list[Sequence]) -> bool:
        """Whether the next prompt, which may not be cut, fits a step only without generation, which
        waits no two steps in a row."""
        if self._cuts is not None or self._generation_waited:
            return False
        first = context[0] if context else self._waiting.head()
        free = self.limits.max_num_tokens - len(generation)  # none: no place to generate, either
        return 0 < free < len(first.tokens) - first.kv_len

    def _demand(self, sequence: Sequence) -> int:
        """Context tokens that a started sequence gets before the next one gets any."""
        span = unread(sequence)
        return least_chunk(span, self._cuts) if self._takes_turns else span.end - span.start

    @property
    def _takes_turns(self) -> bool:
        policy = self.config.context_chunking_policy
        return policy is ContextChunkingPolicy.EQUAL_PROGRESS and self._cuts is not None

    def _chunk(self, context: list[Sequence], budget: int) -> list[Slice]:
        spans, cuts = list(map(unread, context)), self._cuts
        if self._takes_turns and cuts is not None:
            sizes = equal_progress_chunks(spans, budget, cuts)
        else:
            sizes = first_come_chunks(spans, budget, cuts)
        chunks = []
        for sequence, span, size in zip(context, spans, sizes, strict=True):
            num_tokens = size
            if not self._kv_cache.reserve(sequence, span.start + size):
                assert self._capacity.may_pause and cuts is not None, (
                    "a sequence outgrew its reservation"
                )
                room = self._kv_cache.max_reservable_tokens(sequence)
                num_tokens = cuts.last(span, room) - span.start
                self._kv_cache.reserve(sequence, span.start + num_tokens)
            if num_tokens:
                chunks.append(Slice(sequence, span.start, num_tokens))
        return chunks

    def _wanted_draft_len(self, sequence: Sequence) -> int:
        if not self.limits.max_draft_len:
            return 0
        # A round emits accepted + 1 tokens, so a draft beyond the last but one is never used.
        room = sequence.max_len - len(sequence.tokens) - 1
        asked = sequence.request.max_draft_len
        wanted = min(self.draft_lengths.of(sequence), room)
        return wanted if asked is None else min(wanted, asked)

    def _rounds(self, generation: list[Sequence], num_drafts: int) -> list[Slice]:
        draft_lens = [self._wanted_draft_len(sequence) for sequence in generation]
        if sum(draft_lens) > num_drafts:
            draft_lens = fair_shares(draft_lens, num_drafts)
        rounds, block_size = [], self._kv_cache.tokens_per_block
        for sequence, draft_len in zip(generation, draft_lens, strict=True):
            num_tokens = len(sequence.tokens)
            has_room = num_tokens + draft_len <= len(sequence.block_table) * block_size
            if not has_room and not self._kv_cache.reserve(sequence, num_tokens + draft_len):
                assert self._capacity.may_pause, "a sequence outgrew its reservation"
                draft_len = self._kv_cache.max_reservable_tokens(sequence) - num_tokens
                self._kv_cache.reserve(sequence, num_tokens + draft_len)
            rounds.append(Slice(sequence, num_tokens - 1, 1, draft_len))
        return rounds
