"""A next round is started as late as the device allows, and not at all before the prompt of a
request that arrives until then."""

from __future__ import annotations

import threading

import pytest
from support.executor import WAIT_S, collect
from support.fake_rounds import FakeRunner

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.api.inbox import Inbox
from llmctl.runtime.loop import HEADROOM_S, Loop
from llmctl.runtime.request import Request


class Device:
    """An engine and a runner that note what they are given, in order."""

    def __init__(self, fake) -> None:
        events = self.events = []

        class Engine(fake.Engine):
            def run(self, step):
                events.append("step")
                return super().run(step)

        class Runner(FakeRunner):
            def enqueue(self, block_tables, draft_len: int) -> None:
                events.append("round")
                super().enqueue(block_tables, draft_len)

        self.engine = Engine()
        self.runner = Runner(self.engine, None, 0)


def num_tokens(executor: Executor, request_id: int) -> int:
    (response,) = collect(executor, request_id)
    return len(response.result.output_token_ids)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the worker waits for news beside a round; until it is set, rounds take long."""
    waits = threading.Event()
    stays_empty = Inbox.stays_empty

    def noted(self: Inbox, seconds: float) -> bool:
        if seconds == WAIT_S:
            waits.set()
        return stays_empty(self, seconds)

    def spare_s(self: Loop) -> float:
        return WAIT_S if self._rounds.may_wait and not waits.is_set() else 0.0

    monkeypatch.setattr(Inbox, "stays_empty", noted)
    monkeypatch.setattr(Loop, "spare_s", property(spare_s))
    return waits


def test_a_request_that_arrives_in_time_is_read_before_a_further_round(fake, make, waiting):
    device = Device(fake)
    executor = make(device.engine, runner=device.runner)
    first = executor.enqueue_request(Request(input_token_ids=(1, 2, 3), max_tokens=20))
    assert waiting.wait(WAIT_S)
    before = len(device.events)
    assert len(device.runner.in_flight) == 1
    late = executor.enqueue_request(Request(input_token_ids=(4, 5), max_tokens=3))
    assert num_tokens(executor, late) == 3
    assert num_tokens(executor, first) == 20
    assert device.events[before] == "step"


def test_a_closed_executor_ends_without_waiting_for_rounds(fake, make, waiting):
    device = Device(fake)
    executor = make(device.engine, runner=device.runner)
    first = executor.enqueue_request(Request(input_token_ids=(1, 2, 3), max_tokens=20))
    assert waiting.wait(WAIT_S)
    executor.shutdown(drain=True)
    assert num_tokens(executor, first) == 20


def test_there_is_spare_time_only_beside_one_round_of_known_length(fake):
    harness = fake.Harness(fake.Engine(), None, on_device=True)
    loop, rounds = harness.loop, harness.loop._rounds
    assert loop.spare_s == 0
    harness.add(Request(input_token_ids=(1, 2, 3), max_tokens=20))
    harness.step()  # the prompt
    harness.step()  # the first round, which says how long the next one takes
    assert rounds.may_wait
    assert -WAIT_S < loop.spare_s <= max(loop._rounds_s) - HEADROOM_S
    loop.launch()  # the next one is there
    assert not rounds.may_wait and loop.spare_s == 0
