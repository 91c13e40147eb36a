"""The sequences that hold no blocks, in the order in which they may start.

Paused ones come first, the one that was started earliest before the others. Of the rest the highest
priority is next, and among equals the oldest. So that nobody waits for ever under a stream of
higher priorities, the oldest is next after every MOST_OVERTAKES starts that passed it over: a
sequence that finds n others waiting starts as one of the next (n + 1) * (MOST_OVERTAKES + 1).
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
    """Compares as the queue orders."""

    rank: float  # minus the priority
    arrival: int
    sequence: Sequence


class WaitingQueue:
    """Every operation takes O(log n) at most, spread over the calls."""

    def __init__(self) -> None:
        self._paused: deque[Sequence] = deque()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by sequence id, oldest first
        self._ranked: list[_Entry] = []  # a heap; may hold entries that have left
        self._arrivals = itertools.count()
        self._num_overtakes = 0  # starts since the oldest was next

    def __len__(self) -> int:
        return len(self._paused) + len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """The paused ones, then by priority and age: what comes next, overtaking aside."""
        yield from self._paused
        yield from (entry.sequence for entry in sorted(self._entries.values()))

    @property
    def num_paused(self) -> int:
        """Sequences that have run before."""
        return len(self._paused)

    def add(self, sequence: Sequence) -> None:
        """A fresh sequence, behind all of its priority."""
        rank = -sequence.request.priority
        entry = _Entry(rank, next(self._arrivals), sequence)
        self._entries[sequence.sequence_id] = entry
        heapq.heappush(self._ranked, entry)

    def add_paused(self, sequence: Sequence) -> None:
        """A sequence that had to stop, in front of all others."""
        self._paused.appendleft(sequence)

    def head(self) -> Sequence:
        """The next to start; the queue is not empty. Stays the same until it starts or leaves, or
        somebody of a higher priority arrives."""
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
        """Forget a sequence wherever it waits; no effect on others."""
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
        if len(self._ranked) > 2 * len(self._entries) + 64:  # mostly entries that have left
            self._ranked = list(self._entries.values())
            heapq.heapify(self._ranked)
