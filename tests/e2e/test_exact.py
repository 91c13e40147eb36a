"""With a draft, in a batch, in chunks, from a warm cache: always the same tokens as plain and
alone. Real FP8 engines of the demo pair, real kernels."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
from support.e2e import DemoPair, Outputs, PromptMaker, run_all

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import Request, SamplingConfig

NUM_PROMPTS = 240
GREEDY = SamplingConfig()


def sampling(index: int) -> SamplingConfig:
    """A mix of settings: half greedy, the rest sampled with seeds, filters and penalties."""
    kinds = (
        GREEDY,
        SamplingConfig(temperature=0.8, top_k=0, seed=index),
        GREEDY,
        SamplingConfig(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, seed=index),
        SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingConfig(temperature=0.5, top_p=0.7, presence_penalty=0.4, seed=index),
    )
    return kinds[index % len(kinds)]


@pytest.fixture(scope="module")
def requests(prompts: PromptMaker) -> list[Request]:
    rng = random.Random(7)
    return [
        Request(prompt, rng.randint(1, 24), sampling(index), end_id=1)
        for index, prompt in enumerate(prompts(NUM_PROMPTS))
    ]


@pytest.fixture(scope="module")
def plain_alone(demo: DemoPair, requests: list[Request]) -> Outputs:
    """The reference: one request at a time, no draft, no reuse."""
    with demo.executor("target-fp8", enable_block_reuse=False) as executor:
        return [run_all(executor, [request])[0] for request in requests]


@pytest.mark.parametrize("draft", [None, "draft-fp8", "ngram"])
def test_batched_output_equals_plain_output_alone(
    demo: DemoPair,
    requests: list[Request],
    plain_alone: Outputs,
    draft: str | None,
) -> None:
    with demo.executor("target-fp8", draft) as executor:
        together = run_all(executor, requests)
        stats = executor.get_speculation_stats()
    assert together == plain_alone
    assert (stats.accepted_tokens > 0) == (draft is not None)


def test_speculative_output_alone_equals_plain_output_alone(
    demo: DemoPair, requests: list[Request], plain_alone: Outputs
) -> None:
    with demo.executor("target-fp8", "draft-fp8", enable_block_reuse=False) as executor:
        alone = [run_all(executor, [request])[0] for request in requests]
    assert alone == plain_alone


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_and_cancels_change_nobody_elses_output(
    demo: DemoPair,
    requests: list[Request],
    plain_alone: Outputs,
    seed: int,
) -> None:
    rng = random.Random(seed)
    order = rng.sample(range(NUM_PROMPTS), NUM_PROMPTS)
    with demo.executor("target-fp8", "draft-fp8", max_tokens=4096) as executor:
        ids = enqueue_with_cancels(executor, [requests[i] for i in order], rng)
        for index, request_id in zip(order, ids, strict=True):
            if request_id is None:
                continue
            (response,) = executor.await_responses(request_id)
            assert response.result is not None, response.error
            assert [response.result.output_token_ids] == plain_alone[index], index


def enqueue_with_cancels(
    executor: Executor, requests: list[Request], rng: random.Random
) -> list[int | None]:
    """Ids in order, None for those cancelled; long bystanders come and go among them."""
    ids: list[int | None] = []
    bystanders = []
    for request in requests:
        if rng.random() < 0.2:
            bystanders.append(executor.enqueue_request(replace(request, max_tokens=200)))
        if bystanders and rng.random() < 0.2:
            executor.cancel_request(bystanders.pop(rng.randrange(len(bystanders))))
        ids.append(executor.enqueue_request(request))
        if rng.random() < 0.1:
            threading.Event().wait(0.002)  # let some steps pass between arrivals
    for request_id in bystanders:
        executor.cancel_request(request_id)
    return ids


def test_several_returned_sequences_equal_separate_requests_with_their_seeds(
    demo: DemoPair, prompts: PromptMaker
) -> None:
    base = SamplingConfig(temperature=0.9, top_k=0, seed=11)
    prompt = prompts(5)[4]
    several = Request(prompt, 16, replace(base, num_return_sequences=3))
    separate = [Request(prompt, 16, replace(base, seed=11 + i)) for i in range(3)]
    with demo.executor("target-fp8", "draft-fp8") as executor:
        (together,) = run_all(executor, [several])
        assert together == sorted(out for (out,) in run_all(executor, separate))
    assert len(set(together)) == 3
