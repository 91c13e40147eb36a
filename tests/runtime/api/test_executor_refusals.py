"""What an executor refuses, and callbacks that raise: nobody else's request ends."""

from __future__ import annotations

import threading

import pytest
from support.executor import PROMPT, WAIT_S, answer, broken, collect, config

from llmctl.errors import (
    BadConfig,
    ExecutorClosed,
    OutOfMemory,
    PairMismatch,
    PromptTooLong,
    QueueFull,
)
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import FinishReason, Request, SamplingConfig

BAN_ALL = tuple((token,) for token in range(23))  # of the fake engine


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request((1,) * 96, 5), PromptTooLong, "96"),
        (Request((1, 23), 5), BadConfig, "input_token_ids holds token id 23"),
        (Request((1, -1), 5), BadConfig, "holds token id -1"),
        (Request((1,), 5, stop_words=((4, 99),)), BadConfig, "stop_words holds token id 99"),
        (Request((1,), 5, bad_words=((-3,),)), BadConfig, "bad_words holds token id -3"),
        (Request((1, "2"), 5), BadConfig, "input_token_ids holds what is no token id: (1, '2')"),
        (Request((1.0, float("nan")), 5), BadConfig, "input_token_ids holds what is no token id"),
        (Request((1, 2.5), 5), BadConfig, "input_token_ids holds what is no token id: (1, 2.5)"),
        (Request((1,), 5, stop_words=((4, None),)), BadConfig, "stop_words holds what is no"),
        (Request((1,), 5, bad_words=BAN_ALL), BadConfig, "bad_words ban every token"),
        (
            Request((1,), 5, SamplingConfig(min_tokens=1), bad_words=BAN_ALL[1:], end_id=0),
            BadConfig,
            "bad_words ban every token",
        ),
        (Request((1,) * 50, 40), OutOfMemory, "KV blocks"),
    ],
    ids=["too long", "no such id", "negative id", "stop word", "bad word", "text", "nan", "half"]
    + ["nothing", "all banned", "all but the end banned", "too many blocks"],
)
def test_a_refused_request_gets_its_named_error_and_others_go_on(make, request_, error, message):
    executor = make(num_blocks=20)
    good, bad = executor.enqueue_requests([Request(PROMPT, 5), request_])
    (response,) = collect(executor, bad)
    assert type(response.error) is error and message in str(response.error)
    assert not collect(executor, good)[0].has_error


def test_whatever_admission_raises_ends_that_request_alone(make, monkeypatch):
    executor = make()
    refuse = executor._worker.scheduler.add

    def add(sequence) -> None:
        if sequence.request.max_tokens == 6:
            raise MemoryError("no room")
        refuse(sequence)

    monkeypatch.setattr(executor._worker.scheduler, "add", add)
    ids = executor.enqueue_requests([Request(PROMPT, n) for n in (5, 6, 7, 6, 8)])
    ended = [collect(executor, request_id)[-1] for request_id in ids]
    assert [type(response.error) for response in ended[1::2]] == [MemoryError] * 2
    assert not any(response.has_error for response in ended[::2])


def test_who_is_called_with_a_response_may_ask_for_more_and_cancel(make):
    executor = make()
    answers, is_over = [], threading.Event()

    def deliver(response) -> None:
        answers.append(response)
        if len(answers) < 4:
            executor.enqueue_request(Request(PROMPT, 3), deliver)
            executor.cancel_request(response.request_id)
        else:
            is_over.set()

    executor.enqueue_request(Request(PROMPT, 3), deliver)
    assert is_over.wait(WAIT_S) and len({answer.request_id for answer in answers}) == 4


@pytest.fixture
def raised(monkeypatch) -> list[object]:
    """What threads raised and nobody caught."""
    found: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_value))
    return found


def test_a_hook_that_raises_ends_nobody_elses_request(gated, make, monkeypatch):
    def hook(arguments: object) -> None:
        raise RuntimeError("nor mine")

    monkeypatch.setattr(threading, "excepthook", hook)
    engine = gated()
    executor = make(engine)
    first = executor.enqueue_request(Request(PROMPT, 1))
    assert engine.running.wait(WAIT_S)
    executor.enqueue_request(Request(PROMPT, 3), broken)
    last = executor.enqueue_request(Request(PROMPT, 9))
    engine.gate.set()
    for request_id in (first, last):
        assert not collect(executor, request_id)[0].has_error


def test_who_raises_when_called_ends_nobody_elses_request(gated, make, raised):
    engine = gated()
    executor = make(engine)
    answers = []

    executor.enqueue_request(Request(PROMPT, 1))
    assert engine.running.wait(WAIT_S)  # those below arrive, and end, together
    executor.enqueue_request(Request(PROMPT, 3), broken)
    executor.enqueue_request(Request(PROMPT, 3), answers.append)
    read = executor.enqueue_request(Request(PROMPT, 3))
    later = executor.enqueue_request(Request(PROMPT, 9))
    engine.gate.set()
    assert not collect(executor, read)[0].has_error
    assert not collect(executor, later)[0].has_error
    assert len(answers) == 1 and not answers[0].has_error
    assert [type(error) for error in raised] == [ValueError]


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_stream_whose_reader_raises_is_cancelled_at_once(
    gated, make, raised, is_asynchronous, cancel
):
    engine = gated(is_asynchronous=is_asynchronous)
    executor = make(engine)
    executor.enqueue_request(Request(PROMPT, 50, streaming=True), broken)
    assert engine.running.wait(WAIT_S)
    answers = []
    executor.enqueue_request(Request(PROMPT, 3), answers.append)
    read = executor.enqueue_request(Request(PROMPT, 3))
    if cancel:
        executor.cancel_request(999)  # what arrives beside it is not lost
    engine.gate.set()
    assert not collect(executor, read)[0].has_error and len(answers) == 1
    executor.shutdown(drain=True)
    assert len(raised) == 1, "it got more than it could read"


@pytest.mark.parametrize("drain", [False, True])
def test_who_asks_for_more_of_a_closing_executor_is_told_and_the_others_end(
    gated, make, raised, drain
):
    engine = gated()
    executor = make(engine)

    def again(response) -> None:
        executor.enqueue_request(Request(PROMPT, 2), again)

    for _ in range(3):
        executor.enqueue_request(Request(PROMPT, 2), again)
    answers = []
    executor.enqueue_request(Request(PROMPT, 30), answers.append)
    read = executor.enqueue_request(Request(PROMPT, 30))
    assert engine.running.wait(WAIT_S)
    closing = threading.Thread(target=lambda: executor.shutdown(drain=drain))
    closing.start()
    while not executor._inbox.is_closed:
        threading.Event().wait(0.01)
    engine.gate.set()
    closing.join(WAIT_S)
    (last,) = executor.await_responses(read, WAIT_S)
    wanted = FinishReason.LENGTH if drain else FinishReason.CANCELLED
    assert last.result.finish_reason is wanted and len(answers) == 1
    assert {type(error) for error in raised} == {ExecutorClosed}
    assert executor.await_responses(read, WAIT_S)[0].has_error, "taken before"


def test_a_full_queue_refuses_at_the_door_all_or_nothing(gated, make):
    engine = gated(max_batch_size=1)
    executor = make(engine, max_queue_size=2)
    running = executor.enqueue_request(Request(PROMPT, 3))
    assert engine.running.wait(WAIT_S)
    engine.gate.set()
    collect(executor, running)  # started and ended: no longer counted
    engine.gate.clear()
    executor.enqueue_request(Request(PROMPT, 3))
    with pytest.raises(QueueFull, match="max_queue_size 2"):
        executor.enqueue_requests([Request(PROMPT, 3)] * 2)
    executor.enqueue_request(Request(PROMPT, 3))
    engine.gate.set()


def test_refused_and_cancelled_requests_leave_the_queue(gated, make):
    engine = gated(max_batch_size=1)
    executor = make(engine, max_queue_size=1)
    assert answer(executor, Request((99,), 3)).has_error
    running = executor.enqueue_request(Request(PROMPT, 3))
    assert engine.running.wait(WAIT_S)
    engine.gate.set()
    collect(executor, running)
    engine.gate.clear()
    engine.running.clear()
    never_started = executor.enqueue_request(Request(PROMPT, 3))
    executor.cancel_request(never_started)
    engine.gate.set()
    collect(executor, never_started)
    collect(executor, executor.enqueue_request(Request(PROMPT, 3)))


def test_whoever_hears_of_a_refusal_may_take_its_place_in_the_queue(make):
    executor = make(max_queue_size=1)
    heard, answered = [], threading.Event()

    def again(refused) -> None:
        try:
            executor.enqueue_request(Request(PROMPT, 2), heard.append)
        except QueueFull as error:
            heard.append(error)
        answered.set()

    executor.enqueue_request(Request((99,), 3), again)
    assert answered.wait(WAIT_S)
    executor.shutdown(drain=True)
    assert len(heard) == 1 and not isinstance(heard[0], QueueFull)


def test_a_drafter_the_target_was_not_built_for_is_refused(fake):
    with pytest.raises(PairMismatch, match="max_draft_len 8"):
        Executor(fake.Engine(), NgramDrafter(9), config(), ReferenceSampling())


@pytest.mark.parametrize(
    "wrong",
    [
        {"acceptance": "typical"},
        {"max_queue_size": 0},
        {"iter_stats_max_iterations": -1},
        {"request_stats_max_iterations": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_config_values_outside_their_range_are_refused(wrong):
    with pytest.raises(BadConfig, match=next(iter(wrong))):
        config(**wrong)
