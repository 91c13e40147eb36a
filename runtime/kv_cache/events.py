"""Events about cached blocks, for programs that route requests by cache contents.

Events are kept in a bounded buffer that drops the oldest; reading removes them. Names are those of
the TensorRT-LLM executor in snake_case. A block's hash is a function of its tokens, its parent's
hash and whether it was computed with FP8 products, so that processes agree on it.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence as Row
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic

DEVICE_LEVEL = 0
HOST_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Change:
    """A value before and after."""

    old_value: int
    new_value: int


@dataclass(frozen=True, slots=True)
class KvCacheCreatedData:
    """The cache was created: blocks by level, 0 the engine's device, 1 host memory."""

    num_blocks_per_cache_level: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvCacheStoredBlockData:
    """One block that can be reused from now on."""

    block_hash: int
    tokens: tuple[int, ...]
    cache_level: int
    priority: int
    # Its tokens were computed with FP8 products and others were not (`Sequence.context_end`).
    is_fp8: bool = False


@dataclass(frozen=True, slots=True)
class KvCacheStoredData:
    """Consecutive blocks; the first one continues `parent_hash` (None: the start)."""

    parent_hash: int | None
    blocks: tuple[KvCacheStoredBlockData, ...]


@dataclass(frozen=True, slots=True)
class KvCacheRemovedData:
    """Blocks whose content is gone from every level."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvCacheUpdatedData:
    """A block that moved to another level, or got another priority."""

    block_hash: int
    cache_level: Change | None = None
    priority: Change | None = None


EventData = KvCacheCreatedData | KvCacheStoredData | KvCacheRemovedData | KvCacheUpdatedData


@dataclass(frozen=True, slots=True)
class KvCacheEvent:
    """Ids increase by one, so a reader can detect missed events."""

    event_id: int
    data: EventData


class KvCacheEventManager:
    """The event buffer. The cache's thread writes, any thread reads; disabled if its size is 0."""

    def __init__(self, max_size: int) -> None:
        self.is_on = max_size > 0
        self._next_id = 0
        self._events: deque[KvCacheEvent] = deque(maxlen=max_size)
        self._changed = threading.Condition()

    def add(self, data: EventData) -> None:
        """Append an event; a full buffer drops the oldest."""
        if not self.is_on:
            return
        with self._changed:
            self._events.append(KvCacheEvent(self._next_id, data))
            self._next_id += 1
            self._changed.notify_all()

    def get_latest_events(self, timeout_s: float | None = 0.0) -> list[KvCacheEvent]:
        """All events since the last call, oldest first; waits for one until the timeout (None:
        for as long as it takes, which is for ever where events are off)."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            while not self._events:
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            events = list(self._events)
            self._events.clear()
        return events


def block_hash(parent_hash: int | None, tokens: Row[int], is_fp8: bool = False) -> int:
    """A 64-bit hash of `tokens` following the block with `parent_hash`."""
    digest = blake2b(digest_size=8, person=b"fp8" if is_fp8 else b"")
    digest.update(
        struct.pack(f"<?Q{len(tokens)}q", parent_hash is not None, parent_hash or 0, *tokens)
    )
    return int.from_bytes(digest.digest(), "little")
