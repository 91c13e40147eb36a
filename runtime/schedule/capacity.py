"""When a waiting sequence may start, what is kept for those that run, and who gives way.

GUARANTEED_NO_EVICT   starts what fits to its full length beside everybody else's; nobody pauses
STATIC_BATCH          likewise, and only when nothing runs
MAX_UTILIZATION       starts what fits to the end of its next round; when blocks run out, the
                      lowest priority pauses first and of those the latest started. What it has
                      computed stays cached until somebody needs the room.
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
        self._refused = (-1, -1)  # sequence that did not fit, and the cache version it saw
        self._promised: int | None = None  # blocks that the active ones may still ask for

    def begin(self) -> None:
        """A step is to be planned: the active sequences are others than before."""
        self._promised = None

    def try_start(self, head: Sequence, active: Collection[Sequence]) -> bool:
        """Attach `head` to its blocks if it may run beside the active sequences, those included
        that have started since `begin`."""
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
        """Active sequences, the last to be paused first. `active` is in the order of the start."""
        return sorted(active, key=lambda sequence: -sequence.request.priority)

    def _awaits_shared_block(
        self, head: Sequence, match: PrefixMatch, active: Collection[Sequence]
    ) -> bool:
        """True while an active sequence computes the very block that `head` would compute first.

        So n returns of one prompt, or arrivals with one long prefix, compute it once.
        """
        size = self._kv_cache.tokens_per_block
        end = (match.full.depth + 1) * size
        if self.is_static or not self._kv_cache.enable_block_reuse or end >= len(head.tokens):
            return False
        if self._kv_cache.outgrows_window(head):
            return False
        block, prefix = head.tokens[end - size : end], head.tokens[:end]
        return any(
            sequence.kv_len < end
            and sequence.tokens[end - size : end] == block
            and sequence.tokens[:end] == prefix
            for sequence in active
        )

    def _missing_blocks(self, sequence: Sequence) -> int:
        """Of those that are kept for it, the blocks that an active sequence does not hold yet."""
        return max(0, self._goal_blocks(sequence) - self._kv_cache.num_held_blocks(sequence))

    def _goal_blocks(self, sequence: Sequence) -> int:
        """Blocks to keep for a sequence before another may start."""
        num_tokens = sequence.max_len - 1  # the last token never enters the cache
        if self.may_pause:
            num_tokens = min(num_tokens, len(sequence.tokens) + self._limits.max_draft_len)
        return self._kv_cache.num_blocks_to_hold(sequence, num_tokens)
