"""How long the next round may wait for prompts, by a clock that the test turns."""

from __future__ import annotations

import pytest

from llmctl.runtime.rounds.spare_time import HASTY_ROUNDS, LATE, LEAST_AHEAD_S, SpareTime


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rounds(clock: Clock, round_s: float = 10e-3) -> SpareTime:
    """Two have been read, the next one has just begun."""
    spare = SpareTime(clock)
    spare.note_begin()
    for _ in range(2):
        assert spare.seconds <= 0, "too little is known of rounds"
        clock.time_s += round_s
        spare.note_end(round_s)
    return spare


@pytest.mark.parametrize(("round_s", "wanted_s"), [(10e-3, 5e-3), (2.5e-3, 2.5e-3 - LEAST_AHEAD_S)])
def test_the_next_round_is_enqueued_in_time(clock, round_s, wanted_s):
    spare = rounds(clock, round_s)
    assert spare.seconds == pytest.approx(wanted_s)
    clock.time_s += wanted_s / 2
    assert spare.seconds == pytest.approx(wanted_s / 2)
    clock.time_s += wanted_s
    assert spare.seconds < 0


def test_short_rounds_do_not_wait(clock):
    assert rounds(clock, LEAST_AHEAD_S).seconds <= 0


def test_a_round_in_which_a_graph_was_captured_does_not_count(clock):
    spare = rounds(clock)
    clock.time_s += 0.1
    spare.note_end(0.1)
    assert spare.seconds == pytest.approx(5e-3)


def test_a_round_begins_when_it_is_enqueued_if_none_is_in_flight(clock):
    spare = rounds(clock)
    clock.time_s += 0.14  # a prompt was read
    spare.note_begin()
    assert spare.seconds == pytest.approx(5e-3)


def test_a_host_that_was_late_waits_no_more_for_a_while(clock):
    spare = rounds(clock)
    for factor in (1.0, LATE - 0.01):
        spare.note_wait()
        clock.time_s += factor * 10e-3
        spare.note_end(10e-3)
        assert spare.seconds > 0
    clock.time_s += 1.0  # but the next round had been enqueued before
    spare.note_end(10e-3)
    assert spare.seconds > 0
    spare.note_wait()
    clock.time_s += (LATE + 0.01) * 10e-3
    spare.note_end(10e-3)
    for _ in range(HASTY_ROUNDS):
        assert spare.seconds <= 0
        clock.time_s += 10e-3
        spare.note_end(10e-3)
    assert spare.seconds == pytest.approx(5e-3)
