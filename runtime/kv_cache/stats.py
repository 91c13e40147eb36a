"""Counters of the cache. The first nine fields are those of the TensorRT-LLM executor."""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.runtime.kv_cache.store import BlockStore
from llmctl.runtime.request import Sequence


@dataclass(frozen=True, slots=True)
class KvCacheStats:
    """Counts in blocks. `used` are held by sequences; `free` includes cached blocks nobody uses.

    reused + missed is the number of blocks that prompts would have filled without reuse; the
    alloc counters cover the life of the cache, reused full blocks included in the total.
    """

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int
    cached_num_blocks: int = 0  # free blocks whose content can still be reused
    reused_tokens: int = 0  # prompt tokens found in the cache
    prompt_tokens: int = 0  # prompt tokens that could have been found
    evicted_blocks: int = 0  # contents that left the device, offloaded ones included
    host_max_num_blocks: int = 0
    host_used_num_blocks: int = 0
    offloaded_blocks: int = 0  # copied to host memory
    onboarded_blocks: int = 0  # copied back

    @property
    def cache_hit_rate(self) -> float:
        """Reused share of all prompt blocks so far; 0 before the first prompt."""
        asked = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / asked if asked else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Reused share of all prompt tokens so far; 0 before the first prompt."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class PromptCounters:
    """What attached sequences found in the cache, over its life."""

    full_blocks: int = 0
    partial_blocks: int = 0
    missed_blocks: int = 0
    reused_tokens: int = 0
    tokens: int = 0

    def count(
        self,
        sequence: Sequence,
        num_full: int,
        num_copied_tokens: int,
        num_missed: int,
        num_tokens: int,
    ) -> None:
        """One more sequence: the full blocks that it shares, the tokens of another that it has a
        copy of, the blocks that it has to compute, and the tokens that it need not."""
        has_partial = num_copied_tokens > 0
        counts = sequence.blocks
        counts.num_new += has_partial
        counts.num_shared += num_full
        counts.num_reused += num_full + has_partial
        counts.num_missed += num_missed
        counts.num_reused_tokens += num_tokens
        self.full_blocks += num_full
        self.partial_blocks += has_partial
        self.missed_blocks += num_missed
        self.reused_tokens += num_tokens
        self.tokens += len(sequence.tokens) - 1


def make_stats(
    store: BlockStore, prompts: PromptCounters, tokens_per_block: int, num_null_blocks: int
) -> KvCacheStats:
    """The counters now; `num_null_blocks` belong to nobody and hold nothing."""
    num_usable = store.num_blocks - num_null_blocks
    num_taken = store.num_taken - num_null_blocks
    return KvCacheStats(
        max_num_blocks=num_usable,
        free_num_blocks=store.num_available,
        used_num_blocks=num_usable - store.num_available,
        tokens_per_block=tokens_per_block,
        alloc_total_blocks=num_taken + prompts.full_blocks,
        alloc_new_blocks=num_taken,
        reused_blocks=prompts.full_blocks + prompts.partial_blocks,
        missed_blocks=prompts.missed_blocks,
        cached_num_blocks=store.num_unused,
        reused_tokens=prompts.reused_tokens,
        prompt_tokens=prompts.tokens,
        evicted_blocks=store.num_evicted,
        host_max_num_blocks=store.num_host_blocks,
        host_used_num_blocks=store.num_host_used,
        offloaded_blocks=store.num_offloaded,
        onboarded_blocks=store.num_onboarded,
    )
