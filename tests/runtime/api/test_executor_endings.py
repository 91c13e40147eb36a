"""Cancellation, time limits, failing steps, shutdown: every request ends in one way."""

from __future__ import annotations

import threading
from time import monotonic

import numpy as np
import pytest
from support.executor import PROMPT, WAIT_S, answer, collect

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import (
    BadLogits,
    ExecutorClosed,
)
from llmctl.runtime.api import tracking
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.growth.growth import DynamicShape
from llmctl.runtime.drafting.lookahead.drafter import LookaheadDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import FinishReason, Request, SamplingConfig


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
@pytest.mark.parametrize("drafts", ["tokens", "logits", "tree"])
def test_nan_logits_fail_the_request_by_name(fake, make, role, sampling, drafts):
    class Broken(fake.Engine):
        def run(self, step):
            rows = super().run(step)
            if self.num_runs >= 3:
                rows[:, 5] = np.nan
            return rows

    target = Broken() if role == "target" else fake.Engine()
    draft = Broken() if role == "draft" else fake.Engine()
    tree = DynamicShape(num_offers=2, width=2, depth=3) if drafts == "tree" else None
    acceptance = "logits" if drafts == "logits" else "tokens"
    executor = make(
        target, DraftEngineDrafter(draft, 6 if tree else 2, tree), acceptance=acceptance
    )
    response = answer(executor, Request(PROMPT, 20, sampling))
    assert isinstance(response.error, BadLogits) and f"the {role} engine" in str(response.error)


@pytest.mark.parametrize(
    ("drafts", "acceptance", "sampling"),
    [
        ("chain", "tokens", SamplingConfig()),
        ("chain", "tokens", SamplingConfig(top_k=0, seed=1)),
        ("chain", "logits", SamplingConfig()),
        ("tree", "tokens", SamplingConfig()),
        ("lookahead", "tokens", SamplingConfig()),
    ],
)
def test_nan_logits_behind_rejected_drafts_change_no_text(fake, make, drafts, acceptance, sampling):
    """A model may compute them of a text that it would never write."""
    request = Request(PROMPT, 30, sampling)
    wanted = fake.plain_answer(fake.Engine(), request)[0]
    text = [*PROMPT, *wanted]
    num_strange = 0

    class Sensitive(fake.Engine):
        def logits(self, tokens):
            nonlocal num_strange
            if is_strange := list(tokens) != text[: len(tokens)]:
                num_strange += 1
            return super().logits(tokens) * (np.float32("nan") if is_strange else 1)

    tree = DynamicShape(num_offers=2, width=2, depth=3) if drafts == "tree" else None
    drafter: Drafter = DraftEngineDrafter(fake.Engine(agreement=0.6), 6 if tree else 3, tree)
    if drafts == "lookahead":
        drafter = LookaheadDrafter(LookaheadDecodingConfig(3, 3, 3), 8)
    executor = make(Sensitive(), drafter, acceptance=acceptance)
    assert list(answer(executor, request).result.output_token_ids) == wanted
    assert num_strange > 5


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


def test_what_ended_an_executor_between_requests_is_told_of_the_next(make, monkeypatch):
    """Such as a capture ahead of need that failed."""
    executor = make()

    def fail() -> bool:
        raise AssertionError("no such kernel")

    monkeypatch.setattr(executor._worker._loop, "prepare_more", fail)
    executor.await_responses(executor.enqueue_request(Request(PROMPT, 3)), WAIT_S)
    executor._thread.join(WAIT_S)
    with pytest.raises(ExecutorClosed, match="has ended: AssertionError: no such kernel") as told:
        executor.enqueue_request(Request(PROMPT, 3))
    assert isinstance(told.value.__cause__, AssertionError)


def test_nothing_is_remembered_of_sequences_that_ended(make):
    drafter = NgramDrafter(4)
    executor = make(drafter=drafter)
    sampling = SamplingConfig(repetition_penalty=1.1, num_return_sequences=2)
    collect(executor, executor.enqueue_request(Request(PROMPT, 9, sampling)))
    executor.shutdown()
    assert drafter._indexes == executor._worker._sampler._counts == executor._worker._active == {}
