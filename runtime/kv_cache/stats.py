"""What the cache counts. The first nine fields are those of the TensorRT-LLM executor."""

from __future__ import annotations

from dataclasses import dataclass


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
    cached_num_blocks: int = 0  # of the free ones: their content can still be hit
    reused_tokens: int = 0  # of prompts, found in the cache
    prompt_tokens: int = 0  # of prompts, that could have been found
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
