"""Carries out what the KV cache moves, in the caches of target and draft engine alike.

Copies are started in the cache's order before the step that follows. Those from host memory may
still be under way while it runs: the cache hears when they have arrived, and only a step that
cannot do without them waits, on the device.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.kv_cache import Arrival, KvCacheManager
from llmctl.runtime.step import StepRunner


class BlockMover:
    """Between one KV cache and the engines that hold its contents. The loop's thread owns it."""

    def __init__(self, kv_cache: KvCacheManager, target: StepRunner, drafter: Drafter) -> None:
        self._kv_cache = kv_cache
        self._target = target
        self._drafter = drafter
        self._under_way: deque[tuple[int, list[Arrival]]] = deque()  # batches, oldest first
        self.has_failed = False  # the last `start`, so that copies may be missing

    def poll(self) -> None:
        """Tell the cache what has arrived. Does not wait. A copy that failed raises, once."""
        under_way = self._under_way
        try:
            while under_way and all(arrival.is_done() for arrival in under_way[0][1]):
                self._kv_cache.arrivals.note_arrived(under_way.popleft()[0])
        except BaseException:
            for _, arrivals in under_way:
                for arrival in arrivals:
                    with suppress(Exception):  # nothing may land in what others are given next
                        arrival.hold()
            under_way.clear()
            raise

    def start(self) -> None:
        """Start every pending copy; where the next step needs what is under way, the devices wait
        for it before that step."""
        self.has_failed = True
        arrivals = self._kv_cache.arrivals
        copies = self._kv_cache.pending_copies()
        if copies:
            parts: list[Arrival] = []
            self._under_way.append((arrivals.hand_over(), parts))
            for engine in (self._target, self._drafter):
                arrival = engine.copy_blocks(copies)
                if arrival is not None:
                    parts.append(arrival)
        if arrivals.take_wait():
            while self._under_way:
                batch, parts = self._under_way.popleft()
                for arrival in parts:
                    arrival.hold()
                arrivals.note_arrived(batch)
        self.has_failed = False
