"""The front door: answers, endings, limits and statistics, from the outside."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.errors import (
    BadConfig,
    BadLogits,
    ExecutorClosed,
    OutOfMemory,
    PairMismatch,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime import loop
from llmctl.runtime.api import tracking
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import FinishReason, OutputConfig, Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig
from llmctl.runtime.stats.counters import RequestStage

PROMPT = (3, 1, 4, 1, 5)
WAIT_S = 30.0  # a test that waits this long has failed


def config(num_blocks: int = 200, **rest) -> ExecutorConfig:
    return ExecutorConfig(KvCacheConfig(num_blocks), check_invariants=True, **rest)


@pytest.fixture
def make(fake):
    """Executors that are shut down, and whose cache is checked, at the end of the test."""
    made = []

    def make(target=None, drafter=None, runner=None, **rest) -> Executor:
        target = target or fake.Engine()
        made.append(Executor(target, drafter, config(**rest), ReferenceSampling(), runner))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
        executor._worker.kv_cache.check_invariants()


@pytest.fixture
def gated(fake):
    """An engine whose steps wait for `gate`; `running` is set when one waits."""

    class Gated(fake.Engine):
        def __init__(self, **size) -> None:
            super().__init__(**size)
            self.gate, self.running = threading.Event(), threading.Event()

        def run(self, step):
            self.running.set()
            assert self.gate.wait(WAIT_S)
            return super().run(step)

    return Gated


def collect(executor: Executor, request_id: int):
    """Every response of a request, up to its final one."""
    responses = []
    while True:
        got = executor.await_responses(request_id, WAIT_S)
        assert got, "no response in time"
        responses += got
        if got[-1].has_error or got[-1].result.is_final:
            return responses


def answer(executor: Executor, request: Request):
    """The only response of a request that is not streaming."""
    (response,) = collect(executor, executor.enqueue_request(request))
    return response


# ---- answers ----


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
def test_requests_from_many_threads_get_the_plain_answer(fake, make, drafter):
    drafters = {
        "none": None,
        "ngram": NgramDrafter(4),
        "draft": DraftEngineDrafter(fake.Engine(agreement=0.7), 4),
    }
    executor = make(drafter=drafters[drafter])
    wrong = []

    def client(number: int) -> None:
        for turn in range(5):
            sampling = SamplingConfig(top_k=8, seed=number) if turn % 2 else SamplingConfig()
            request = Request((number, turn, *PROMPT), 20, sampling, client_id=number)
            response = answer(executor, request)
            wanted, reason = fake.plain_answer(fake.Engine(), request)
            result = response.result
            if (list(result.output_token_ids), result.finish_reason) != (wanted, reason):
                wrong.append(response)
            if response.client_id != number:
                wrong.append(response)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(WAIT_S)
    assert not wrong


def test_streaming_delivers_each_token_once_and_says_when_it_is_over(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.7), 3))
    request = Request(PROMPT, 25, streaming=True)
    results = [r.result for r in collect(executor, executor.enqueue_request(request))]
    tokens = [token for result in results for token in result.output_token_ids]
    assert tokens == fake.plain_answer(fake.Engine(), request)[0]
    assert all(result.output_token_ids for result in results)
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    assert {result.finish_reason for result in results[:-1]} == {FinishReason.NOT_FINISHED}


def test_streaming_may_repeat_the_whole_output_each_time(fake, make):
    output = OutputConfig(return_all_generated_tokens=True)
    request = Request(PROMPT, 6, output_config=output, streaming=True)
    executor = make()
    results = [r.result for r in collect(executor, executor.enqueue_request(request))]
    wanted = tuple(fake.plain_answer(fake.Engine(), request)[0])
    assert [result.output_token_ids for result in results] == [wanted[: n + 1] for n in range(6)]


def test_the_prompt_comes_along_unless_excluded(fake, make):
    output = OutputConfig(exclude_input_from_output=False)
    response = answer(make(), Request(PROMPT, 4, output_config=output))
    wanted = fake.plain_answer(fake.Engine(), Request(PROMPT, 4))[0]
    assert response.result.output_token_ids == (*PROMPT, *wanted)


def test_log_probs_are_those_of_the_target_with_and_without_a_draft(fake, make):
    output = OutputConfig(return_log_probs=True)
    request = Request(PROMPT, 20, SamplingConfig(top_k=5, temperature=2.0), output)
    plain = answer(make(), request).result
    drafter = DraftEngineDrafter(fake.Engine(agreement=0.5), 4)
    drafted = answer(make(drafter=drafter), request).result
    wanted = []
    for count, token in enumerate(plain.output_token_ids):
        history = np.array([*PROMPT, *plain.output_token_ids[:count]])
        logits = fake.Engine().logits(history).astype(np.float64)
        wanted.append(logits[token] - np.log(np.exp(logits).sum()))
    assert plain.log_probs == pytest.approx(wanted, abs=1e-9)
    assert drafted == plain
    assert plain.cum_log_prob == pytest.approx(sum(wanted))


def test_n_returns_sample_with_consecutive_seeds_and_compute_the_prompt_once(fake, make):
    target = fake.Engine()
    executor = make(target)
    sampling = SamplingConfig(temperature=2.0, top_k=0, seed=2**64 - 2, num_return_sequences=4)
    request = Request(tuple(range(17)), 10, sampling)
    results = [r.result for r in collect(executor, executor.enqueue_request(request))]
    assert sorted(result.sequence_index for result in results) == [0, 1, 2, 3]
    assert [result.is_final for result in results] == [False] * 3 + [True]
    assert all(result.is_sequence_final for result in results)
    by_index = {result.sequence_index: list(result.output_token_ids) for result in results}
    for index in range(4):
        seed = (2**64 - 2 + index) % 2**64
        alone = Request(tuple(range(17)), 10, SamplingConfig(temperature=2.0, top_k=0, seed=seed))
        assert by_index[index] == fake.plain_answer(target, alone)[0]
    # 17 prompt tokens once, the last one again for each sibling, then 9 roots each.
    assert sum(target.num_tokens) == 17 + 3 + 4 * 9


def test_n_returns_without_block_reuse_give_the_same(fake):
    sampling = SamplingConfig(temperature=2.0, top_k=0, num_return_sequences=3)
    request = Request(PROMPT, 10, sampling)
    found = []
    for reuse in (True, False):
        cache = KvCacheConfig(100, enable_block_reuse=reuse)
        with Executor(fake.Engine(), None, ExecutorConfig(cache), ReferenceSampling()) as executor:
            responses = collect(executor, executor.enqueue_request(request))
        found.append({r.result.sequence_index: r.result.output_token_ids for r in responses})
    assert found[0] == found[1] and len(set(found[0].values())) > 1


@pytest.mark.parametrize("name", ["draft", "ngram", "rounds"])
@pytest.mark.parametrize("agreement", [0.0, 0.9])
def test_adaptive_draft_lengths_change_no_token(fake, make, name, agreement):
    target, draft = fake.Engine(max_batch_size=4), fake.Engine(agreement=agreement)
    drafter = NgramDrafter(6) if name == "ngram" else DraftEngineDrafter(draft, 6)
    runner = fake.Runner(target, draft, 6) if name == "rounds" else None
    executor = make(target, drafter=drafter, runner=runner, adaptive_draft_len=True)
    requests = [Request((n, *PROMPT), 60, SamplingConfig(top_k=3, seed=n)) for n in range(12)]
    for request_id, request in zip(executor.enqueue_requests(requests), requests, strict=True):
        (response,) = collect(executor, request_id)
        wanted = fake.plain_answer(target, request)[0]
        assert list(response.result.output_token_ids) == wanted
    lengths = {r.num_draft_tokens for s in executor.get_latest_iteration_stats() for r in s.rounds}
    assert 0 in lengths and len(lengths) > 1


def test_a_request_may_ask_for_fewer_drafts_or_none(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.9), 6))
    for most in (0, 2):
        request = Request(PROMPT, 30, max_draft_len=most)
        response = answer(executor, request)
        assert (
            list(response.result.output_token_ids) == fake.plain_answer(fake.Engine(), request)[0]
        )
        rounds = [r for s in executor.get_latest_iteration_stats() for r in s.rounds]
        assert max(r.num_draft_tokens for r in rounds) == most
    with pytest.raises(BadConfig, match="max_draft_len is -1"):
        Request(PROMPT, 30, max_draft_len=-1)


# ---- waiting ----


def test_responses_are_awaited_by_id_by_ids_or_all(fake, make):
    executor = make()
    ids = executor.enqueue_requests([Request(PROMPT, 3), Request((9, 9), 3), Request((7,), 3)])
    both = executor.await_responses(ids[:2], WAIT_S)
    assert [[r.request_id for r in responses] for responses in both] == [[ids[0]], [ids[1]]]
    (rest,) = executor.await_responses(timeout_s=WAIT_S)
    assert rest.request_id == ids[2]


def test_a_timeout_gives_an_empty_list(gated, make):
    engine = gated()
    executor = make(engine)
    request_id = executor.enqueue_request(Request(PROMPT, 3))
    assert executor.await_responses(request_id, 0.01) == []
    assert executor.await_responses(timeout_s=0.0) == []
    assert executor.await_responses([request_id], 0.01) == [[]]
    assert executor.get_num_responses_ready() == 0
    engine.gate.set()
    collect(executor, request_id)


def test_unknown_and_terminated_ids_give_one_error_response(make):
    executor = make()
    done = answer(executor, Request(PROMPT, 2)).request_id
    for request_id in (done, 999):
        (response,) = executor.await_responses(request_id, WAIT_S)
        assert isinstance(response.error, RequestError)
        assert "already processed and terminated" in str(response.error)


def test_ready_responses_are_counted_without_taking_them(gated, make):
    engine = gated()
    executor = make(engine)
    first, second = executor.enqueue_requests([Request(PROMPT, 1), Request((1, 2), 1)])
    engine.gate.set()
    executor.await_responses(second, WAIT_S)
    assert executor.get_num_responses_ready(first) == executor.get_num_responses_ready() == 1
    assert len(executor.await_responses(first, WAIT_S)) == 1
    assert executor.get_num_responses_ready() == 0


# ---- refusals ----


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
        (Request((1,) * 50, 40), OutOfMemory, "KV blocks"),
    ],
    ids=["too long", "no such id", "negative id", "stop word", "bad word", "text", "nan", "half"]
    + ["nothing", "too many blocks"],
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


def broken(response) -> None:
    raise ValueError("not my day")


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


# ---- endings ----


def test_a_cancelled_request_ends_with_an_empty_final_result(gated, make):
    engine = gated()
    executor = make(engine)
    running, queued = executor.enqueue_requests([Request(PROMPT, 60, streaming=True)] * 2)
    assert engine.running.wait(WAIT_S)
    executor.cancel_request(running)
    executor.cancel_request(queued)
    executor.cancel_request(12345)  # no such request: no effect
    engine.gate.set()
    for request_id in (running, queued):
        last = collect(executor, request_id)[-1].result
        assert last.finish_reason is FinishReason.CANCELLED
        assert last.output_token_ids == () and last.is_final
    assert answer(executor, Request(PROMPT, 2)).result.finish_reason is FinishReason.LENGTH


def test_cancelling_n_returns_ends_every_sequence(gated, make):
    engine = gated()
    executor = make(engine)
    sampling = SamplingConfig(num_return_sequences=3)
    request_id = executor.enqueue_request(Request(PROMPT, 60, sampling))
    assert engine.running.wait(WAIT_S)
    executor.cancel_request(request_id)
    engine.gate.set()
    results = [r.result for r in collect(executor, request_id)]
    assert [r.sequence_index for r in results] == [0, 1, 2]
    assert [r.is_final for r in results] == [False, False, True]


def test_a_request_out_of_time_keeps_what_it_has_generated(gated, make, monkeypatch):
    engine = gated()
    executor = make(engine)
    request_id = executor.enqueue_request(Request(PROMPT, 80, allotted_time_ms=60_000.0))
    assert engine.running.wait(WAIT_S)
    monkeypatch.setattr(tracking, "monotonic", lambda: monotonic() + 60.0)  # inside the first step
    engine.gate.set()
    result = collect(executor, request_id)[0].result
    assert result.finish_reason is FinishReason.TIMED_OUT
    assert len(result.output_token_ids) == 1


def test_a_step_that_raises_fails_the_requests_it_touched_and_nobody_else(fake, make):
    target = fake.Engine(max_batch_size=2)
    target.fail_at = 4
    draft = fake.Engine(agreement=0.5)
    executor = make(target, DraftEngineDrafter(draft, 2))
    requests = [Request((n, *PROMPT), 30) for n in range(5)]
    ids = executor.enqueue_requests(requests)
    for index, (request_id, request) in enumerate(zip(ids, requests, strict=True)):
        (response,) = collect(executor, request_id)
        if index < 2:  # the others waited
            assert str(response.error) == "the engine broke"
            continue
        wanted = fake.plain_answer(target, request)[0]
        assert list(response.result.output_token_ids) == wanted


def test_a_prompt_that_waits_for_its_turn_survives_a_failure_of_the_others_step(fake, make):
    target = fake.Engine(max_num_tokens=8)
    executor = make(target)
    first, second = Request(tuple(range(20)), 4), Request((9, *range(20)), 4)
    target.fail_at = 2  # a chunk of the first prompt, which fills the step
    ids = executor.enqueue_requests([first, second])
    assert str(collect(executor, ids[0])[0].error) == "the engine broke"
    (response,) = collect(executor, ids[1])
    assert list(response.result.output_token_ids) == fake.plain_answer(target, second)[0]


def test_a_failure_while_blocks_are_copied_fails_every_request_that_holds_some(fake, make):
    class Broken(fake.Engine):
        def copy_blocks(self, copies):
            raise RuntimeError("the copy broke")

    executor = make(Broken())
    answer(executor, Request(tuple(range(10)), 2))
    # It begins like the first, and differs inside a block: that block is to be copied.
    response = answer(executor, Request((*range(6), 9, 9, 9), 2))
    assert str(response.error) == "the copy broke"
    request = Request((17, 3), 5)
    wanted = fake.plain_answer(fake.Engine(), request)[0]
    assert list(answer(executor, request).result.output_token_ids) == wanted


def test_a_draft_that_raises_fails_the_requests_of_the_step(fake, make):
    draft = fake.Engine()
    draft.fail_at = 3
    executor = make(drafter=DraftEngineDrafter(draft, 4))
    assert str(answer(executor, Request(PROMPT, 10)).error) == "the engine broke"
    assert not answer(executor, Request(PROMPT, 10)).has_error


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(top_k=0, seed=1)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("acceptance", ["tokens", "logits"])
def test_nan_logits_fail_the_request_by_name(fake, make, role, sampling, acceptance):
    class Broken(fake.Engine):
        def run(self, step):
            rows = super().run(step)
            if self.num_runs >= 3:
                rows[:, 5] = np.nan
            return rows

    target = Broken() if role == "target" else fake.Engine()
    draft = Broken() if role == "draft" else fake.Engine()
    executor = make(target, DraftEngineDrafter(draft, 2), acceptance=acceptance)
    response = answer(executor, Request(PROMPT, 20, sampling))
    assert isinstance(response.error, BadLogits) and f"the {role} engine" in str(response.error)


def test_when_recovery_raises_too_everybody_is_told_and_the_executor_closes(
    fake, make, monkeypatch
):
    target = fake.Engine(max_batch_size=1)
    target.fail_at = 2
    executor = make(target)

    def broken(sequence):
        raise ValueError("the scheduler broke")

    monkeypatch.setattr(executor._worker.scheduler, "cancel", broken)
    ids = executor.enqueue_requests([Request(PROMPT, 9), Request((1, 2), 9)])
    errors = [str(collect(executor, request_id)[0].error) for request_id in ids]
    assert errors == ["the engine broke", "the scheduler broke"]
    executor._thread.join(WAIT_S)
    assert not executor.can_enqueue_requests()


def test_shutdown_cancels_what_is_left_and_may_be_repeated(gated, make):
    engine = gated(max_batch_size=1)
    executor = make(engine)
    ids = executor.enqueue_requests([Request(PROMPT, 60), Request((1, 2), 60)])
    assert engine.running.wait(WAIT_S) and executor.can_enqueue_requests()
    late = executor.enqueue_request(Request((5,), 5))  # in the inbox while the step runs
    closing = [threading.Thread(target=executor.shutdown) for _ in range(2)]
    for thread in closing:
        thread.start()
    engine.gate.set()
    for thread in closing:
        thread.join(WAIT_S)
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    for request_id in (*ids, late):
        (response,) = executor.await_responses(request_id, WAIT_S)
        assert response.result.finish_reason is FinishReason.CANCELLED and response.result.is_final
    assert executor.await_responses() == []  # nothing can come any more: no waiting
    with pytest.raises(ExecutorClosed):
        executor.enqueue_request(Request(PROMPT, 3))


def test_nothing_is_remembered_of_sequences_that_ended(make):
    drafter = NgramDrafter(4)
    executor = make(drafter=drafter)
    sampling = SamplingConfig(repetition_penalty=1.1, num_return_sequences=2)
    collect(executor, executor.enqueue_request(Request(PROMPT, 9, sampling)))
    executor.shutdown()
    assert drafter._indexes == executor._worker._sampler._counts == executor._worker._active == {}


def test_a_step_time_target_shrinks_prompt_chunks_and_changes_no_token(fake, make, monkeypatch):
    now_s = 0.0

    class TimedEngine(fake.Engine):
        def run(self, step):
            nonlocal now_s
            now_s += 0.0009 * len(step.token_ids)
            return super().run(step)

    monkeypatch.setattr(loop, "perf_counter", lambda: now_s)
    request = Request(tuple(i % 20 for i in range(200)), 4)
    free, limited = (TimedEngine(max_seq_len=256) for _ in range(2))
    unhurried = answer(make(free), request)
    hurried = answer(make(limited, max_step_ms=8.0), request)
    assert hurried.result.output_token_ids == unhurried.result.output_token_ids
    assert free.num_tokens[:4] == [48, 48, 48, 48]
    assert limited.num_tokens[:3] == [4, 8, 8]  # 7.2 ms; one block more would take 10.8
    assert set(limited.num_tokens[1:-4]) == {8}


def test_the_knee_of_step_times_is_found_while_prompts_are_computed(fake, make, monkeypatch):
    now_s = 0.0

    class TimedEngine(fake.Engine):
        def run(self, step):
            nonlocal now_s
            now_s += 0.001 * len(step.token_ids)  # nothing is gained by long steps
            return super().run(step)

    monkeypatch.setattr(loop, "perf_counter", lambda: now_s)
    target = TimedEngine(max_seq_len=1024)
    request = Request(tuple(i % 20 for i in range(700)), 4)
    answer(make(target, max_step_ms="auto"), request)
    assert target.num_tokens[0] == 48 and target.num_tokens[40] == 4


def test_a_step_time_target_needs_chunked_context(fake, make):
    scheduler = SchedulerConfig(enable_chunked_context=False)
    with pytest.raises(BadConfig, match="chunked context"):
        Executor(
            fake.Engine(), None, config(scheduler=scheduler, max_step_ms=5.0), ReferenceSampling()
        )
    with pytest.raises(BadConfig, match="max_step_ms is 0"):
        Executor(fake.Engine(), None, config(max_step_ms=0.0), ReferenceSampling())


# ---- statistics ----


def test_iteration_stats_are_bounded_and_drained(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(), 3), iter_stats_max_iterations=4)
    answer(executor, Request(tuple(range(20)), 30))
    executor.shutdown()
    stats = executor.get_latest_iteration_stats()
    assert [item.iter for item in stats] == list(range(stats[-1].iter - 3, stats[-1].iter + 1))
    assert executor.get_latest_iteration_stats() == []
    last = stats[-1]
    assert (last.num_completed_requests, last.num_queued_requests) == (1, 0)
    assert last.inflight_batching_stats.num_gen_requests == 1
    full = stats[0].spec_decoding_stats
    assert (full.num_draft_tokens, full.num_accepted_tokens) == (3, 3)
    assert full.acceptance_length == 4.0 and 0 < full.draft_overhead < 1
    assert last.kv_cache_stats.max_num_blocks == 200


def test_the_rounds_of_the_iterations_add_up_to_the_totals(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.6), 3))
    tokens = answer(executor, Request(PROMPT, 40)).result.output_token_ids
    executor.shutdown()
    total, steps = executor.get_speculation_stats(), executor.get_latest_iteration_stats()
    rounds = [item for step in steps for item in step.rounds]
    assert len(rounds) == total.rounds
    assert sum(item.num_draft_tokens for item in rounds) == total.draft_tokens
    assert sum(item.num_accepted_tokens for item in rounds) == total.accepted_tokens
    assert 1 + sum(item.num_tokens for item in rounds) == len(tokens)  # 1: out of the prompt
    of_rounds = [step for step in steps if step.rounds]
    assert len(of_rounds) == len(steps) - 1, "the first step reads the prompt"
    assert sum(step.draft_latency_ms for step in of_rounds) == pytest.approx(1e3 * total.draft_s)
    assert sum(step.verify_latency_ms for step in of_rounds) == pytest.approx(1e3 * total.verify_s)


def test_the_first_iteration_shows_the_context_and_the_start(make):
    executor = make()
    answer(executor, Request(tuple(range(20)), 3))
    executor.shutdown()
    first, second, _ = executor.get_latest_iteration_stats()
    assert first.num_new_active_requests == 1 and second.num_new_active_requests == 0
    assert first.inflight_batching_stats.num_ctx_tokens == 20
    assert first.new_active_requests_queue_latency_ms >= 0
    assert second.spec_decoding_stats is None
    assert second.inflight_batching_stats.avg_num_decoded_tokens_per_iter == 1.0


def test_request_stats_follow_a_request_to_its_end(fake, make):
    target = fake.Engine(max_num_tokens=8)
    executor = make(target, request_stats_max_iterations=100)
    answer(executor, Request(tuple(range(16)), 3))
    answer(executor, Request((*range(16), 5), 3))
    executor.shutdown()
    history = [item.request_stats[0] for item in executor.get_latest_request_stats()]
    assert [item.stage for item in history[:4]] == [
        RequestStage.CONTEXT_IN_PROGRESS,
        RequestStage.GENERATION_IN_PROGRESS,
        RequestStage.GENERATION_IN_PROGRESS,
        RequestStage.GENERATION_COMPLETE,
    ]
    assert [item.context_prefill_position for item in history[:2]] == [8, 16]
    assert [item.num_generated_tokens for item in history[:4]] == [0, 1, 2, 3]
    assert history[-1].reused_tokens_per_request == 16
    assert history[-1].kv_cache_hit_rate_per_request == 1  # 4 blocks of 4, and the last token
    assert executor.get_latest_request_stats() == []


def test_speculation_totals_add_up(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.6), 3))
    for number in range(10):
        answer(executor, Request((number, *PROMPT), 40))
    executor.shutdown()
    stats = executor.get_speculation_stats()
    assert sum(stats.histogram) == stats.rounds
    assert sum(a * count for a, count in enumerate(stats.histogram)) == stats.accepted_tokens
    assert sum(stats.accepted_at_position) == stats.accepted_tokens
    assert stats.accepted_at_position == sorted(stats.accepted_at_position, reverse=True)
    assert stats.acceptance_length == pytest.approx(10 * 39 / stats.rounds)
    assert min(stats.draft_s, stats.verify_s, stats.host_s) > 0


# ---- everything at once ----

actions = st.lists(
    st.tuples(
        st.sampled_from(["request", "request", "request", "cancel", "wait"]),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40)
@given(actions, st.sampled_from(["none", "ngram", "draft"]), st.booleans(), st.booleans())
def test_every_request_ends_in_exactly_one_state_and_no_block_leaks(
    fake, steps, name, pauses, is_patient
):
    drafter = {
        "none": lambda: None,
        "ngram": lambda: NgramDrafter(3),
        "draft": lambda: DraftEngineDrafter(fake.Engine(agreement=0.7), 3),
    }[name]()
    policies = CapacitySchedulerPolicy
    policy = policies.MAX_UTILIZATION if pauses else policies.GUARANTEED_NO_EVICT
    settings_ = config(26, scheduler=SchedulerConfig(policy), request_stats_max_iterations=5)
    ids: list[int] = []
    finals: dict[int, int] = {}

    def note(responses) -> None:
        for response in responses:
            if response.has_error or response.result.is_final:
                finals[response.request_id] = finals.get(response.request_id, 0) + 1

    with Executor(
        fake.Engine(max_batch_size=3), drafter, settings_, ReferenceSampling()
    ) as executor:
        for kind, number in steps:
            generator = np.random.default_rng(number)
            if kind == "request":
                request = Request(
                    tuple(generator.integers(0, 24, generator.integers(1, 100)).tolist()),
                    int(generator.integers(1, 60)),
                    SamplingConfig(num_return_sequences=int(generator.integers(1, 4))),
                    streaming=bool(generator.integers(2)),
                    allotted_time_ms=float(generator.choice([0.5, 1e6])),
                )
                ids.append(executor.enqueue_request(request))
            elif kind == "cancel" and ids:
                executor.cancel_request(ids[number % len(ids)])
            elif kind == "wait":
                note(executor.await_responses(timeout_s=0.002))
        while is_patient and len(finals) < len(ids):  # otherwise shutdown cancels the rest
            note(executor.await_responses(timeout_s=WAIT_S))
    note(executor.await_responses())
    assert finals == dict.fromkeys(ids, 1)
    assert executor.await_responses() == []
    assert executor._worker.kv_cache.stats().used_num_blocks == 0
    executor._worker.kv_cache.check_invariants()
