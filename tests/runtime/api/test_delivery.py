"""When what a step brought is delivered: at once, or while a device is busy with the next step."""

from __future__ import annotations

import asyncio
import gc
import threading
from types import SimpleNamespace

import pytest

from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api import delivery, freezing
from llmctl.runtime.api.async_executor import _LoopBridge
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.api.mailbox import Mailbox
from llmctl.runtime.request import FinishReason, Request
from llmctl.runtime.response import Response

WAIT_S = 30.0
PROMPT = (3, 1, 4, 1, 5)


class Watched:
    """An executor whose steps and responses are written down in their order."""

    def __init__(self, fake, *, is_asynchronous: bool, has_rounds: bool = False, **rest) -> None:
        self.log: list[str] = []
        self.responses = []
        self.over = threading.Event()
        self.on_response = lambda response: None
        watched = self

        class Engine(fake.Engine):
            def run(self, step):
                watched.log.append("run")
                return super().run(step)

        class Runner(fake.Runner):
            def enqueue(self, tables, draft_len):
                watched.log.append("round")
                super().enqueue(tables, draft_len)

        engine = Engine(is_asynchronous=is_asynchronous)
        runner = Runner(engine, None, 0) if has_rounds else None
        config = ExecutorConfig(KvCacheConfig(50), check_invariants=True, **rest)
        self.executor = Executor(engine, None, config, ReferenceSampling(), runner)

    def answer(self, request: Request) -> list[str]:
        """What happened, to the end of the request."""
        self.executor.enqueue_request(request, self._take)
        assert self.over.wait(WAIT_S)
        return self.log

    def _take(self, response) -> None:
        self.log.append("response")
        self.responses.append(response)
        self.on_response(response)
        if response.result is None or response.result.is_final:
            self.over.set()


@pytest.fixture
def watch(fake):
    """Makes watched executors, which are shut down in the end."""
    made = []

    def make(**rest) -> Watched:
        made.append(Watched(fake, **rest))
        return made[-1]

    yield make
    for watched in made:
        watched.executor.shutdown()


def test_an_engine_that_computes_at_once_is_followed_by_its_response(watch):
    log = watch(is_asynchronous=False).answer(Request(PROMPT, 3, streaming=True))
    assert log == ["run", "response"] * 3


def test_a_device_has_its_next_step_before_the_last_is_delivered_but_for_the_first_token(watch):
    log = watch(is_asynchronous=True).answer(Request(PROMPT, 4, streaming=True))
    assert log == ["run", "response", "run", *["run", "response"] * 2, "response"]


def test_a_first_token_is_delivered_before_the_blocks_of_its_prompt_are_published(watch):
    watched = watch(is_asynchronous=True)
    scheduler = watched.executor._worker.scheduler
    update = scheduler.update

    def updated(batch) -> None:
        watched.log.append("publish")
        update(batch)

    scheduler.update = updated
    log = watched.answer(Request(PROMPT, 3, streaming=True))
    assert log[:4] == ["run", "response", "publish", "run"]
    assert log.count("response") == log.count("publish") == 3


def test_the_thread_steps_aside_for_a_first_token_where_somebody_waits(watch, monkeypatch):
    slept = []
    monkeypatch.setattr(delivery, "sleep", slept.append)
    watched = watch(is_asynchronous=True)
    watched.answer(Request(PROMPT, 3, streaming=True))
    assert slept == [delivery.HAND_OVER_S]
    executor = watched.executor
    request_id = executor.enqueue_request(Request(PROMPT, 3, streaming=True))
    assert executor.settle(WAIT_S), "its responses are left for who comes later"
    assert len(slept) == 1 and len(executor.await_responses(request_id, WAIT_S)) == 3


def test_a_mailbox_tells_whether_a_reader_was_waiting():
    mailbox = Mailbox()
    mailbox.open([1, 2])
    assert not mailbox.post([Response(1)]), "nobody waits"
    reader = threading.Thread(target=mailbox.take, args=(2, WAIT_S))
    reader.start()
    while 2 not in mailbox._waiters:
        assert reader.is_alive()
    assert not mailbox.post([Response(1)]), "somebody waits for another request"
    assert mailbox.post([Response(2)])
    reader.join()


def test_so_has_a_device_that_goes_over_to_rounds(watch):
    log = watch(is_asynchronous=True, has_rounds=True).answer(Request(PROMPT, 4, streaming=True))
    assert log[:4] == ["run", "response", "round", "round"]
    assert log.count("response") == 4


def test_statistics_of_requests_are_those_of_their_step_whatever_comes_next(watch):
    watched = watch(is_asynchronous=True, request_stats_max_iterations=9)
    assert watched.answer(Request(PROMPT, 3, streaming=True)) == ["run", "response"] * 3
    counts = [
        stats.num_generated_tokens
        for iteration in watched.executor.get_latest_request_stats()
        for stats in iteration.request_stats
    ]
    assert counts == [1, 2, 3]


def test_iterations_are_the_same_whether_delivered_late_or_not(watch):
    found = []
    for is_asynchronous in (False, True):
        watched = watch(is_asynchronous=is_asynchronous)
        watched.answer(Request(PROMPT, 6, streaming=True))
        watched.executor.shutdown()
        stats = watched.executor.get_latest_iteration_stats()
        found.append(
            [
                (
                    item.iter,
                    item.num_active_requests,
                    item.num_completed_requests,
                    item.num_new_active_requests,
                    item.kv_cache_stats,
                    item.inflight_batching_stats,
                    list(item.rounds),
                )
                for item in stats
            ]
        )
    assert found[0] == found[1] and len(found[0]) == 6


def test_a_request_cancelled_while_a_step_is_undelivered_gets_that_step_first(fake, watch):
    watched = watch(is_asynchronous=True)

    def cancel(response):
        if len(watched.responses) == 2:  # the first token is delivered at once
            watched.executor.cancel_request(response.request_id)

    watched.on_response = cancel
    request = Request(PROMPT, 50, streaming=True)
    watched.answer(request)
    *earlier, last = (response.result for response in watched.responses)
    assert last.finish_reason is FinishReason.CANCELLED and last.is_final
    tokens = [token for result in earlier for token in result.output_token_ids]
    assert tokens == fake.plain_answer(fake.Engine(), request)[0][: len(tokens)]
    assert 2 < len(tokens) < 50


def test_a_step_that_fails_delivers_the_one_before_it(fake, watch):
    watched = watch(is_asynchronous=True)
    watched.executor._worker._target.fail_at = 3
    watched.answer(Request(PROMPT, 9, streaming=True))
    assert [response.has_error for response in watched.responses] == [False, False, True]


@pytest.fixture
def nothing_frozen(monkeypatch):
    """The program has frozen nothing, and no executor has found that it had."""
    monkeypatch.setattr(freezing, "_is_left_to_program", False)
    gc.unfreeze()  # what collecting the tests froze
    yield
    gc.freeze()


def test_full_garbage_collections_pass_over_what_was_there_before_the_executor(
    watch, nothing_frozen
):
    watched = watch(is_asynchronous=False)
    assert gc.get_freeze_count() > 10_000
    watched.executor.shutdown()
    assert gc.get_freeze_count() == 0


def test_of_several_executors_the_last_to_end_has_objects_collected_again(watch, nothing_frozen):
    first, second = (watch(is_asynchronous=False).executor for _ in range(2))
    first.shutdown()
    first.shutdown()
    assert gc.get_freeze_count() > 10_000
    second.shutdown()
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_itself_stays_as_it_is(watch, nothing_frozen):
    watch(is_asynchronous=False).executor.shutdown()
    gc.freeze()
    frozen = gc.get_freeze_count()
    watched = watch(is_asynchronous=False)
    assert 10_000 < gc.get_freeze_count() <= frozen  # some are freed, none is added
    watched.executor.shutdown()
    assert 10_000 < gc.get_freeze_count() <= frozen


@pytest.mark.parametrize("last", range(1, 40, 3))
def test_an_end_amid_a_load_answers_whoever_had_finished_as_finished(fake, watch, last):
    requests = [Request((n, *PROMPT), 3 + n % 5, streaming=True) for n in range(12)]
    watched = watch(is_asynchronous=True)

    def close(response) -> None:
        if len(watched.responses) == last:  # the next step runs, and will be held when it ends
            watched.executor._inbox.close()

    watched.on_response = close
    for request in requests:
        watched.executor.enqueue_request(request, watched._take)
    watched.executor._thread.join(WAIT_S)
    ends = [r.result for r in watched.responses if r.result is None or r.result.is_final]
    assert len(ends) == len(requests) and None not in ends
    for request_id, request in enumerate(requests, 1):
        own = [r.result for r in watched.responses if r.request_id == request_id]
        tokens = [token for result in own for token in result.output_token_ids]
        wanted = fake.plain_answer(fake.Engine(), request)[0]
        assert tokens == wanted[: len(tokens)]
        is_whole = own[-1].finish_reason is FinishReason.LENGTH
        assert is_whole == (len(tokens) == len(wanted))


def test_an_event_loop_is_woken_once_for_what_comes_before_it_wakes():
    calls = []
    bridge = _LoopBridge(SimpleNamespace(call_soon_threadsafe=calls.append))
    queues = [asyncio.Queue(), asyncio.Queue()]
    for number in range(6):
        bridge.post(queues[number % 2], Response(number))
    assert len(calls) == 1
    calls.pop()()
    assert [[queue.get_nowait().request_id for _ in range(3)] for queue in queues] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    bridge.post(queues[0], Response(6))
    assert len(calls) == 1 and queues[0].empty()
    calls.pop()()
    assert queues[0].get_nowait().request_id == 6
