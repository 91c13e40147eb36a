"""The runner of device rounds on a device made of fakes: its tokens."""

from __future__ import annotations

import pytest
from support.cuda_rounds import (
    DRAFT_LEN,
    Device,
    Lengths,
    make_request,
)

from llmctl.runtime.request import FinishReason, Request, SamplingConfig


def test_rounds_give_the_plain_answer_beside_any_batch_mates(fake, device):
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    requests = [make_request(i, 4 + 5 * i) for i in range(5)]
    sequences = [harness.add(request) for request in requests[:3]]
    for _ in range(3):
        harness.step()
    sequences += [harness.add(request) for request in requests[3:]]
    harness.run()
    for request, sequence in zip(requests, sequences, strict=True):
        wanted, reason = fake.plain_answer(fake.Engine(), request)
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
        assert sequence.finish_reason is reason is FinishReason.LENGTH
    assert harness.kv_cache.stats().used_num_blocks == 0
    assert device.capture.num_captured > 2


@pytest.mark.parametrize("num_requests", [1, 4])
def test_the_draft_length_of_a_round_is_its_graphs(fake, make_engine, num_requests):
    device = Device(make_engine)
    harness = fake.Harness(
        device.target,
        device.drafter,
        draft=device.draft,
        runner=device.runner,
        draft_lengths=Lengths(),
    )
    requests = [make_request(i, 70) for i in range(num_requests)]
    sequences = [harness.add(request) for request in requests]
    drafted = set()
    while harness.scheduler.has_work:
        drafted |= {commit.num_drafts for commit in harness.step().commits}
    assert drafted == {0, 1, 2, 3}
    for request, sequence in zip(requests, sequences, strict=True):
        assert (
            sequence.tokens[sequence.num_prompt_tokens :]
            == fake.plain_answer(fake.Engine(), request)[0]
        )
    assert device.capture.num_captured >= 2 * DRAFT_LEN + 1


def test_no_graph_is_replayed_for_requests_that_take_other_kernels_to_draw(fake, make_engine):
    device = Device(make_engine, with_draft=False)
    captured = []
    for params in (
        SamplingConfig(),
        SamplingConfig(temperature=0.9, top_k=4, top_p=0.9, seed=1),
        SamplingConfig(temperature=0.9, top_k=0, top_p=0.9, seed=1),
        SamplingConfig(temperature=0.7, top_k=3, seed=2),
        SamplingConfig(temperature=0.7, top_k=0, min_p=0.1, seed=2),
    ):
        request = Request((3, 1, 4), 9, params)
        harness = fake.Harness(device.target, device.drafter, runner=device.runner)
        sequence = harness.add(request)
        harness.run()
        assert sequence.tokens[3:] == fake.plain_answer(fake.Engine(), request)[0]
        captured.append(list(device.capture.launches.values()))
    assert [len(graphs) for graphs in captured] == [1, 2, 3, 3, 3]
    greedy, narrow, wide = captured[-1]
    assert greedy < narrow < wide
