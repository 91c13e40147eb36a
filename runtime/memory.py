"""How many KV blocks fit: target and draft are planned together before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmctl.errors import BadConfig, OutOfMemory

DEFAULT_FREE_FRACTION = 0.5  # of the memory that is free now; a CPU shares it with everything else


class KvShape(Protocol):
    """What the plan needs to know of an executable."""

    tokens_per_block: int
    max_batch_size: int
    max_seq_len: int

    @property
    def kv_bytes_per_block(self) -> int: ...  # bytes of one block over all layers


@dataclass(frozen=True, slots=True)
class KvCachePlan:
    """The shared number of blocks and what limited it."""

    num_blocks: int
    bytes_per_block: int  # target and draft together
    free_bytes: int
    limited_by: str  # "free memory" | "max_tokens" | "max_batch_size"

    @property
    def total_bytes(self) -> int:
        """Bytes of both caches."""
        return self.num_blocks * self.bytes_per_block


def free_memory_bytes() -> int:
    """Memory the kernel says can be taken without swapping (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OutOfMemory(
        "/proc/meminfo has no MemAvailable line", fix="set --max-tokens-in-paged-kv-cache"
    )


def plan_kv_cache(
    target: KvShape,
    draft: KvShape | None,
    *,
    free_fraction: float = DEFAULT_FREE_FRACTION,
    max_tokens: int | None = None,
    free_bytes: int | None = None,
) -> KvCachePlan:
    """Blocks for both caches: the smallest of what memory, `max_tokens` and the batch limit allow.

    The batch limit is twice max_batch_size full sequences: more can never be in use, the second
    half leaves finished sequences in the cache for reuse. Raises BadConfig for a fraction outside
    (0, 1) and OutOfMemory when not even one block fits; a sequence too long for the pool is
    refused by the scheduler when it arrives.
    """
    if not 0 < free_fraction < 1:
        raise BadConfig(f"the KV cache memory fraction is {free_fraction}; it must be in (0, 1)")
    free = free_memory_bytes() if free_bytes is None else free_bytes
    bytes_per_block = target.kv_bytes_per_block + (draft.kv_bytes_per_block if draft else 0)
    blocks_per_sequence = -(-target.max_seq_len // target.tokens_per_block)
    limits = {
        "free memory": int(free * free_fraction) // bytes_per_block,
        "max_batch_size": 2 * target.max_batch_size * blocks_per_sequence,
    }
    if max_tokens is not None:
        limits["max_tokens"] = max_tokens // target.tokens_per_block
    limited_by = min(limits, key=limits.__getitem__)
    num_blocks = limits[limited_by]
    if num_blocks < 1:
        raise OutOfMemory(
            f"the KV cache gets {num_blocks} blocks of {bytes_per_block / 1e6:.2f} MB "
            f"({target.tokens_per_block} tokens each), limited by {limited_by}; "
            f"{free / 1e9:.2f} GB are free",
            fix="raise --kv-cache-free-gpu-memory-fraction or --max-tokens-in-paged-kv-cache",
        )
    return KvCachePlan(num_blocks, bytes_per_block, free, limited_by)
