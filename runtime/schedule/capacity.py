"""When a waiting sequence may start, which blocks are kept for running ones, and which is paused.

GUARANTEED_NO_EVICT   starts a sequence if its full length fits beside the others'; never pauses
STATIC_BATCH          the same, but only when nothing runs
MAX_UTILIZATION       starts a sequence if it fits up to the end of its next round; if blocks run
                      out, the lowest priority is paused, among equals the latest started. What
                      it has computed stays cached until the blocks are needed.
"""

from __future__ import annotations

from collections.abc import Collection

from llmctl.runtime.kv_cache import KvCacheManager, PrefixMatch
from llmctl.runtime.request import Sequence
from llmctl.runtime.schedule.admission import CapacitySchedulerPolicy, Limits, SchedulerConfig


class Capacity:
    """The capacity policy of one scheduler over one KV cache."""

    def __init__(self, config: SchedulerConfig, kv_cache: KvCacheManager, limits: Limits) -> None:
        policy = config.capacity_scheduler_policy
        self.is_static = policy is CapacitySchedulerPolicy.STATIC_BATCH
        self.may_pause = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        self._kv_cache = kv_cache
        self._limits = limits
        # the sequence that did not fit, and the cache version at that time
        self._refused = (-1, -1)
        self._promised: int | None = None  # blocks that active sequences may still need

    def begin(self) -> None:
        """A step is about to be planned: the active sequences may have changed."""
        self._promised = None

    def try_start(self, head: Sequence, active: Collection[Sequence]) -> bool:
        """Attach `head` to its blocks if it may run together with the active sequences, including
        those that have started since `begin`."""
        kv_cache = self._kv_cache
        attempt = (head.sequence_id, kv_cache.version)
        if attempt == self._refused:
            return False
        match = kv_cache.lookup(head)
        if self._awaits_shared_block(head, match, active):
            return False
        if self._promised is None:
            self._promised = sum(map(self._missing_blocks, active))
        wanted = self._goal_blocks(head) - match.num_blocks_in_use
        if wanted > kv_cache.num_available_blocks - self._promised:
            self._refused = attempt
            return False
        kv_cache.attach(head, match)
        self._promised += self._missing_blocks(head)
        return True

    def by_claim(self, active: Collection[Sequence]) -> list[Sequence]:
        """Active sequences, the last to be paused first. `active` is in the order of their
        start."""
        return sorted(active, key=lambda sequence: -sequence.request.priority)

    def _awaits_shared_block(
        self, head: Sequence, match: PrefixMatch, active: Collection[Sequence]
    ) -> bool:
        """True while an active sequence computes the same block that `head` would compute first, or
        the same group of blocks.

        So several outputs of one prompt, or requests with a common long prefix, compute it once.
        """
        size = self._kv_cache.tokens_per_block
        start = match.full.depth * size
        end = start + (self._kv_cache.context_group if start < head.context_end else size)
        if self.is_static or not self._kv_cache.enable_block_reuse or end >= len(head.tokens):
            return False
        if self._kv_cache.outgrows_window(head):
            return False
        block, prefix = head.tokens[end - size : end], head.tokens[:end]
        return any(
            sequence.kv_len < end
            and min(sequence.context_end, end) == min(head.context_end, end)
            and sequence.tokens[end - size : end] == block
            and sequence.tokens[:end] == prefix
            for sequence in active
        )

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Of the blocks kept for an active sequence, the number that it does not hold yet."""
        return max(0, self._goal_blocks(sequence) - self._kv_cache.num_held_blocks(sequence))

    def _goal_blocks(self, sequence: Sequence) -> int:
        """Blocks to keep for a sequence before another one may start."""
        num_tokens = sequence.max_len - 1  # the last token never enters the cache
        if self.may_pause:
            num_tokens = min(num_tokens, len(sequence.tokens) + self._limits.max_draft_len)
        return self._kv_cache.num_blocks_to_hold(sequence, num_tokens)
