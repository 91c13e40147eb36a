"""Carries out the KV cache's block copies, in every cache group.

Copies are started in the cache's order before the next step. Copies from host memory may still be
in flight while it runs: the cache is told when they are complete, and only a step that needs them
waits, on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from llmctl.runtime.kv_cache import Arrival, BlockHolder, KvCacheManager


class BlockMover:
    """Connects one KV cache with the holders of its contents, by group name. The loop's thread owns
    it."""

    def __init__(self, kv_cache: KvCacheManager, holders: Mapping[str, BlockHolder]) -> None:
        self._kv_cache = kv_cache
        self._holders = [holders[group] for group in kv_cache.groups]
        # batches in flight, oldest first
        self._under_way: deque[tuple[int, list[Arrival]]] = deque()
        self.has_failed = False  # the last `start` failed, so copies may be missing

    def poll(self) -> None:
        """Tell the cache which copies are complete. Does not wait. A failed copy raises, once."""
        under_way = self._under_way
        try:
            while under_way and all(arrival.is_done() for arrival in under_way[0][1]):
                self._kv_cache.arrivals.note_arrived(under_way.popleft()[0])
        except BaseException:
            for _, arrivals in under_way:
                for arrival in arrivals:
                    with suppress(Exception):  # no copy may write to blocks that are reused next
                        arrival.hold()
            under_way.clear()
            raise

    def start(self) -> None:
        """Start every pending copy; if the next step needs copies that are in flight, the devices
        wait for them before that step."""
        self.has_failed = True
        arrivals = self._kv_cache.arrivals
        copies = self._kv_cache.pending_copies()
        if copies:
            parts: list[Arrival] = []
            self._under_way.append((arrivals.hand_over(), parts))
            for group, holder in enumerate(self._holders):
                wanted = [copy for copy in copies if copy.groups >> group & 1]
                arrival = holder.copy_blocks(wanted) if wanted else None
                if arrival is not None:
                    parts.append(arrival)
        if arrivals.take_wait():
            while self._under_way:
                batch, parts = self._under_way.popleft()
                for arrival in parts:
                    arrival.hold()
                arrivals.note_arrived(batch)
        self.has_failed = False
