"""The executor from the outside: answers, streams, waiting for responses."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.executor import PROMPT, WAIT_S, answer, collect

from llmctl.errors import (
    BadConfig,
    RequestError,
)
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import FinishReason, OutputConfig, Request, SamplingConfig


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


def test_n_returns_have_one_array_of_the_prompt_before_the_first_step(gated, make):
    engine = gated()
    executor = make(engine)
    request_id = executor.enqueue_request(
        Request(PROMPT, 3, sampling_config=SamplingConfig(num_return_sequences=3))
    )
    assert engine.running.wait(WAIT_S)
    first, *others = executor._worker._active[request_id].sequences
    assert first.prompt_ids is not None and tuple(first.prompt_ids) == PROMPT
    assert [sequence.prompt_ids is first.prompt_ids for sequence in others] == [True, True]
    engine.gate.set()
    collect(executor, request_id)


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
