"""The sequences that hold no blocks, in the order in which they may start.

Paused sequences come first, in the order in which they first started. Of the rest, the one with the
highest priority is next, among equals the oldest. To prevent starvation by a stream of higher
priorities, the oldest is next after MOST_OVERTAKES later sequences have started before it: a
sequence that finds n others waiting is one of the next (n + 1) * (MOST_OVERTAKES + 1) to start.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

from llmctl.runtime.request import Sequence

MOST_OVERTAKES = 16


class _Entry(NamedTuple):
    """Ordered like the queue."""

    rank: float  # minus the priority
    arrival: int
    sequence: Sequence


class WaitingQueue:
    """Every operation takes amortized O(log n) time."""

    def __init__(self) -> None:
        self._paused: deque[Sequence] = deque()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by sequence id, oldest first
        self._ranked: list[_Entry] = []  # a heap; may hold entries that have left
        self._arrivals = itertools.count()
        self._num_overtakes = 0  # starts since the oldest was next

    def __len__(self) -> int:
        return len(self._paused) + len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Paused sequences, then the others by priority and age (ignoring the overtaking rule)."""
        yield from self._paused
        yield from (entry.sequence for entry in sorted(self._entries.values()))

    @property
    def num_paused(self) -> int:
        """Sequences that have run before."""
        return len(self._paused)

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, after all others of its priority."""
        rank = -sequence.request.priority
        entry = _Entry(rank, next(self._arrivals), sequence)
        self._entries[sequence.sequence_id] = entry
        heapq.heappush(self._ranked, entry)

    def add_paused(self, sequence: Sequence) -> None:
        """Add a paused sequence, before all others."""
        self._paused.appendleft(sequence)

    def head(self) -> Sequence:
        """The next to start; the queue is not empty. It stays the same until it starts or leaves,
        or until a sequence of higher priority arrives."""
        if self._paused:
            return self._paused[0]
        if self._num_overtakes >= MOST_OVERTAKES:
            return self._oldest()
        while not self._is_waiting(self._ranked[0]):
            heapq.heappop(self._ranked)
        return self._ranked[0].sequence

    def take(self, head: Sequence) -> None:
        """The head has started."""
        if self._paused:
            self._paused.popleft()
            return
        self._num_overtakes = 0 if head is self._oldest() else self._num_overtakes + 1
        self._leave(head)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence wherever it waits; no effect if it does not."""
        if sequence.sequence_id in self._entries:
            self._leave(sequence)
        elif sequence in self._paused:
            self._paused.remove(sequence)

    def _oldest(self) -> Sequence:
        return next(iter(self._entries.values())).sequence

    def _is_waiting(self, entry: _Entry) -> bool:
        return self._entries.get(entry.sequence.sequence_id) is entry

    def _leave(self, sequence: Sequence) -> None:
        del self._entries[sequence.sequence_id]
        # mostly entries of sequences that have left
        if len(self._ranked) > 2 * len(self._entries) + 64:
            self._ranked = list(self._entries.values())
            heapq.heapify(self._ranked)
