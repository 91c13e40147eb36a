"""Who is next: paused sequences, then priority, then age, and nobody waits for ever."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.errors import BadConfig
from llmctl.runtime.request import Request, Sequence
from llmctl.runtime.schedule.waiting_queue import MOST_OVERTAKES, WaitingQueue

_ids = itertools.count(1)


def make(priority: float = 0.5) -> Sequence:
    number = next(_ids)
    request = Request((1, 2), max_tokens=4, priority=priority)
    return Sequence(number, number, request, 0, [1, 2], 2, 6)


def take(queue: WaitingQueue) -> Sequence:
    head = queue.head()
    queue.take(head)
    return head


def test_equal_priorities_start_in_the_order_of_arrival():
    queue, sequences = WaitingQueue(), [make() for _ in range(40)]
    for sequence in sequences:
        queue.add(sequence)
    assert [take(queue) for _ in range(40)] == sequences and len(queue) == 0


def test_the_higher_priority_is_next_and_a_paused_sequence_is_before_it():
    queue = WaitingQueue()
    low, high, first, second = make(0.1), make(0.9), make(0.0), make(0.0)
    for sequence in (low, high):
        queue.add(sequence)
    queue.add_paused(second)  # the latest started is paused first
    queue.add_paused(first)
    assert list(queue) == [first, second, high, low] and queue.num_paused == 2
    assert [take(queue) for _ in range(4)] == [first, second, high, low]


def test_a_sequence_is_found_by_what_it_is_not_by_what_it_holds():
    queue, number = WaitingQueue(), next(_ids)
    request = Request((1, 2), max_tokens=4)
    first, second = (Sequence(number, number, request, 0, [1, 2], 2, 6) for _ in range(2))
    queue.add_paused(first)
    assert second not in list(queue)
    assert {first: "one", second: "other"}[first] == "one"


def test_under_a_stream_of_high_priorities_a_low_one_starts_in_its_turn():
    queue, low = WaitingQueue(), make(0.0)
    queue.add(low)
    num_starts = 0
    while True:
        queue.add(make(1.0))
        num_starts += 1
        if take(queue) is low:
            break
    assert num_starts == MOST_OVERTAKES + 1


@given(st.integers(0, 2**32))
def test_nobody_is_passed_over_more_often_than_the_bound(seed):
    chance, queue = random.Random(seed), WaitingQueue()
    deadlines: dict[int, int] = {}  # sequence id -> number of starts by which it has started
    num_starts = 0
    for _ in range(600):
        if chance.random() < 0.5:
            sequence = make(chance.choice([0.0, 0.5, 0.5, 1.0]))
            deadlines[sequence.sequence_id] = num_starts + (len(queue) + 1) * (MOST_OVERTAKES + 1)
            queue.add(sequence)
        if len(queue) and chance.random() < 0.05:
            gone = chance.choice(list(queue))
            queue.discard(gone)
            del deadlines[gone.sequence_id]
        if len(queue) and chance.random() < 0.45:
            assert queue.head() is queue.head()
            started = take(queue)
            num_starts += 1
            assert num_starts <= deadlines.pop(started.sequence_id)
    assert {sequence.sequence_id for sequence in queue} == set(deadlines)


def test_sequences_that_left_are_not_kept():
    queue, last = WaitingQueue(), make(0.0)
    queue.add(last)
    for _ in range(1000):
        cancelled = make(0.0)
        queue.add(cancelled)
        queue.discard(cancelled)
    queue.discard(make())  # never was there
    assert len(queue) == 1 and len(queue._ranked) < 200
    assert take(queue) is last


@pytest.mark.parametrize("priority", [-0.1, 1.1, float("nan")])
def test_a_priority_outside_0_to_1_is_refused(priority):
    with pytest.raises(BadConfig, match="priority"):
        make(priority)
