"""Memory planning: all engines are planned together, from numbers, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llmctl.errors import BadConfig, OutOfMemory
from llmctl.plugins.backends.host_memory import free_memory_bytes
from llmctl.runtime.kv_cache import AttentionWindow

DEFAULT_FREE_FRACTION = 0.5  # of the memory that is free now; a CPU shares it with everything else


class KvShape(Protocol):
    """What the plan needs to know of an engine."""

    @property
    def tokens_per_block(self) -> int: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def kv_bytes_per_block(self) -> int: ...  # bytes of one block over all layers


@dataclass(frozen=True, slots=True)
class KvCachePlan:
    """The shared number of blocks and what limited it."""

    num_blocks: int
    bytes_per_block: int  # of all engines together
    free_bytes: int
    limited_by: str  # "free memory" | "max_tokens" | "max_batch_size" | "32-bit slots"

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches."""
        return self.num_blocks * self.bytes_per_block


def plan_kv_cache(
    engines: Sequence[KvShape],
    *,
    free_fraction: float = DEFAULT_FREE_FRACTION,
    max_tokens: int | None = None,
    free_bytes: int | None = None,
    window: AttentionWindow | None = None,
    max_step_tokens: int = 0,
) -> KvCachePlan:
    """Blocks for the caches of all engines, the target's first: the smallest of what memory,
    `max_tokens` and the batch limit allow.

    The batch limit is twice max_batch_size full sequences: more can never be in use, the second
    half leaves finished sequences in the cache for reuse. With a `window` a long sequence holds a
    ring of blocks, for steps of up to `max_step_tokens` of its tokens. Raises BadConfig for a
    fraction outside (0, 1) and OutOfMemory when not even one block fits; a sequence too long for
    the pool is refused by the scheduler when it arrives.
    """
    if not 0 < free_fraction < 1:
        raise BadConfig(f"the KV cache memory fraction is {free_fraction}; it must be in (0, 1)")
    free = free_memory_bytes() if free_bytes is None else free_bytes
    target = engines[0]
    bytes_per_block = sum(engine.kv_bytes_per_block for engine in engines)
    blocks_per_sequence = -(-target.max_seq_len // target.tokens_per_block)
    num_null = 0  # null blocks, in place of blocks that rings have given back
    if window is not None:
        ring = window.most_blocks(max_step_tokens, target.tokens_per_block)
        blocks_per_sequence, num_null = min(blocks_per_sequence, ring), 1
    limits = {
        "free memory": int(free * free_fraction) // bytes_per_block,
        "max_batch_size": 2 * target.max_batch_size * blocks_per_sequence + num_null,
    }
    limits["32-bit slots"] = (2**31 - 1) // target.tokens_per_block  # steps name slots in 32 bits
    if max_tokens is not None:
        limits["max_tokens"] = max_tokens // target.tokens_per_block
    limited_by = min(limits, key=limits.__getitem__)
    num_blocks = limits[limited_by]
    if num_blocks < 1:
        raise OutOfMemory(
            f"the KV cache gets {num_blocks} blocks of {bytes_per_block / 1e6:.2f} MB "
            f"({target.tokens_per_block} tokens each), limited by {limited_by}; "
            f"{free / 1e9:.2f} GB are free",
            fix="raise --max-tokens-in-paged-kv-cache"
            if limited_by == "max_tokens"
            else "raise --kv-cache-free-gpu-memory-fraction",
        )
    return KvCachePlan(num_blocks, bytes_per_block, free, limited_by)


def host_blocks(plan: KvCachePlan, num_bytes: int | None) -> int:
    """Blocks of both caches that `num_bytes` of host memory hold; 0 for None.

    Raises BadConfig when that is not one block, OutOfMemory when the memory is not there.
    """
    if num_bytes is None:
        return 0
    num_blocks = num_bytes // plan.bytes_per_block
    if num_blocks < 1:
        raise BadConfig(
            f"--kv-cache-host-memory-bytes is {num_bytes}; one KV block takes "
            f"{plan.bytes_per_block} bytes"
        )
    require_host_memory(num_bytes)
    return num_blocks


def require_host_memory(num_bytes: int) -> None:
    """Raise OutOfMemory if so much of this machine's memory is not free."""
    free = free_memory_bytes()
    if num_bytes > free:
        raise OutOfMemory(
            f"--kv-cache-host-memory-bytes is {num_bytes / 1e9:.2f} GB; {free / 1e9:.2f} GB "
            "of host memory are free",
            fix="lower --kv-cache-host-memory-bytes",
        )


# ---- a GPU: everything is planned together before anything is allocated ----

DEFAULT_DEVICE_FRACTION = 0.9  # of what weights, activations and graphs leave
GRAPH_BYTES_PER_LAUNCH = 16 << 10  # of a captured graph; measured on H200, see docs/performance
RESERVED_BYTES = 512 << 20  # loaded kernels, the driver's memory, and the allocator's rounding


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Device memory that one engine takes, in bytes, and the size of its sequences."""

    role: str  # "target", or that of a draft engine
    weight_bytes: int
    activation_bytes: int  # the arena, logits included
    scratch_bytes: int  # of kernels, of sampling, and buffers of a host tier
    graph_bytes: int
    kv_bytes_per_block: int
    tokens_per_block: int
    max_batch_size: int
    max_seq_len: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        parts = (self.weight_bytes, self.activation_bytes, self.scratch_bytes, self.graph_bytes)
        return sum(parts)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """How a device's memory is divided."""

    engines: tuple[EngineMemory, ...]  # the target first
    kv_cache: KvCachePlan
    total_bytes: int  # of the device

    @property
    def planned_bytes(self) -> int:
        """Everything, KV caches and reserve included."""
        fixed = sum(engine.fixed_bytes for engine in self.engines)
        return fixed + RESERVED_BYTES + self.kv_cache.total_bytes

    def lines(self) -> list[str]:
        """The plan as a table, in GB."""
        kv = self.kv_cache
        rows = [
            ("weights", [e.weight_bytes for e in self.engines]),
            ("activations", [e.activation_bytes for e in self.engines]),
            ("scratch", [e.scratch_bytes for e in self.engines]),
            ("CUDA graphs", [e.graph_bytes for e in self.engines]),
            ("KV cache", [e.kv_bytes_per_block * kv.num_blocks for e in self.engines]),
            ("kernels, reserve", [RESERVED_BYTES]),
        ]
        head = "".join(f"{engine.role:>10}" for engine in self.engines)
        return [
            f"{'device memory, GB':<20}{head}",
            *(f"  {name:<18}" + "".join(f"{v / 1e9:10.3f}" for v in row) for name, row in rows),
            f"  {'together':<18}{self.planned_bytes / 1e9:10.3f} of "
            f"{kv.free_bytes / 1e9:.3f} free ({self.total_bytes / 1e9:.3f} on the device)",
        ]


def plan_device(
    engines: Sequence[EngineMemory],
    *,
    free_bytes: int,
    total_bytes: int,
    free_fraction: float = DEFAULT_DEVICE_FRACTION,
    max_tokens: int | None = None,
    window: AttentionWindow | None = None,
    max_step_tokens: int = 0,
) -> DevicePlan:
    """Weights, activations and graphs first; all KV caches share what `free_fraction` of the rest
    and the other bounds of `plan_kv_cache` allow.

    Raises OutOfMemory with the numbers when the engines do not fit, or leave no room for a block.
    """
    fixed = sum(engine.fixed_bytes for engine in engines) + RESERVED_BYTES
    left = free_bytes - fixed
    if left <= 0:
        raise _does_not_fit(engines, fixed, free_bytes, total_bytes)
    kv_cache = plan_kv_cache(
        engines,
        free_fraction=free_fraction,
        max_tokens=max_tokens,
        free_bytes=left,
        window=window,
        max_step_tokens=max_step_tokens,
    )
    return DevicePlan(tuple(engines), replace(kv_cache, free_bytes=free_bytes), total_bytes)


def _does_not_fit(
    engines: Sequence[EngineMemory], fixed: int, free_bytes: int, total_bytes: int
) -> OutOfMemory:
    parts = ", ".join(
        f"{engine.role} {engine.weight_bytes / 1e9:.2f} GB of weights and "
        f"{(engine.fixed_bytes - engine.weight_bytes) / 1e9:.2f} GB beside them"
        for engine in engines
    )
    if sum(engine.weight_bytes for engine in engines) + RESERVED_BYTES < free_bytes:
        fix = "rebuild with a smaller --max-num-tokens or --max-batch-size"
    elif len(engines) > 1 and engines[0].fixed_bytes + RESERVED_BYTES < free_bytes:
        fix = "run without --draft-engine, or with a smaller or quantized draft"
    else:
        fix = "quantize the checkpoint first (llmctl quantize --qformat fp8), or free the device"
    return OutOfMemory(
        f"the engines need {fixed / 1e9:.2f} GB before any KV cache ({parts}, "
        f"{RESERVED_BYTES / 1e9:.2f} GB reserved); the device has {free_bytes / 1e9:.2f} GB free "
        f"of {total_bytes / 1e9:.2f}",
        fix=fix,
    )
