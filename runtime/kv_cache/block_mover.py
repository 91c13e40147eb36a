"""Carries out what the KV cache moves, in every cache group.

Copies are started in the cache's order before the step that follows. Those from host memory may
still be under way while it runs: the cache hears when they have arrived, and only a step that
cannot do without them waits, on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from llmctl.runtime.kv_cache import Arrival, BlockHolder, KvCacheManager


class BlockMover:
    """Between one KV cache and what holds its contents, by the name of the group. The loop's
    thread owns it."""

    def __init__(self, kv_cache: KvCacheManager, holders: Mapping[str, BlockHolder]) -> None:
        self._kv_cache = kv_cache
        self._holders = [holders[group] for group in kv_cache.groups]
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
