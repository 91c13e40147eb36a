"""Requests that arrive while a device reads prompts are admitted before it has read them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.executor import PROMPT, WAIT_S, collect

from llmctl.plugins.ops.sampling.spec import BestIds
from llmctl.runtime.request import Request


@pytest.fixture
def device(fake):
    """An engine that returns before its step is done, which it is when `gate` is open."""

    class Device(fake.Engine):
        def __init__(self, **size) -> None:
            super().__init__(is_asynchronous=True, **size)
            self.gate, self.is_read = threading.Event(), threading.Event()
            self.gate.set()

        def run(self, step):
            ids = super().run(step).argmax(axis=1).astype(np.int32)

            def read():
                self.is_read.set()
                assert self.gate.wait(WAIT_S)
                return ids

            return BestIds(len(ids), read)

    return Device


def test_a_request_is_admitted_while_the_device_reads_another_prompt(fake, device, make):
    engine = device()
    executor = make(engine)
    loop, scheduler = executor._worker._loop, executor._worker.scheduler
    first = executor.enqueue_request(Request(PROMPT, 1))
    collect(executor, first)  # a step whose time is known
    engine.is_read.clear()
    engine.gate.clear()
    loop._least_token_s = WAIT_S  # long enough for any machine
    added, add = threading.Event(), scheduler.add

    def adding(sequence) -> None:
        add(sequence)
        if loop._host_step is not None and scheduler.num_active:
            loop._host_step = loop._host_step._replace(busy_until=0.0)  # it goes on
            loop._least_token_s = 1e-9
            added.set()

    scheduler.add = adding
    running = threading.Event()
    run = engine.run

    def noted(step):
        running.set()
        return run(step)

    engine.run = noted
    second = executor.enqueue_request(Request(PROMPT, 2))
    assert running.wait(WAIT_S)
    third = executor.enqueue_request(Request((*PROMPT, 9), 2))
    assert added.wait(WAIT_S) and not engine.gate.is_set()
    engine.gate.set()
    for request_id, prompt in ((second, PROMPT), (third, (*PROMPT, 9))):
        (response,) = collect(executor, request_id)
        tokens, _ = fake.plain_answer(engine, Request(prompt, 2))
        assert list(response.result.output_token_ids) == tokens


def test_only_a_step_that_is_waited_for_and_whose_like_was_measured_leaves_time(fake, device):
    harness = fake.Harness(device(max_num_tokens=8))
    harness.add(Request(tuple(range(12)), 2))
    harness.loop._least_token_s = 1.0
    harness.loop.launch()
    assert harness.loop.spare_s <= 0, "a chunk that brings no token"
    harness.loop.settle(harness.loop.finish())
    harness.loop.launch()
    assert 1 < harness.loop.spare_s <= 2, "half of four tokens' time"
    harness.loop.settle(harness.loop.finish())
    assert harness.loop._least_token_s < 1
    harness.loop._least_token_s = None
    harness.loop.launch()
    assert harness.loop.spare_s <= 0, "nothing was measured"


def test_an_engine_that_computes_at_once_leaves_none(fake):
    harness = fake.Harness(fake.Engine())
    harness.add(Request(PROMPT, 3))
    harness.step()
    assert harness.loop._least_token_s is not None
    harness.loop.launch()
    assert harness.loop.spare_s <= 0
