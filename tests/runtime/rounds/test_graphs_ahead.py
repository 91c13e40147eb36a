"""Graphs of rounds are captured while there are no requests, so that none is captured in a load."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from support.cuda_rounds import DRAFT_LEN, Device, Lengths, make_request
from support.lookahead_rounds import LookaheadDevice
from support.medusa_rounds import MedusaDevice

from llmctl.builder.heads.medusa.tree import MedusaTree
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.runtime.engines.graphs import kv_bucket, kv_buckets
from llmctl.runtime.request import SamplingConfig

BUCKETS = (16, 24)  # tokens; behind these come powers of two


@pytest.fixture(autouse=True)
def short_buckets(monkeypatch) -> None:
    monkeypatch.setattr("llmctl.runtime.engines.graphs._KV_BUCKETS", BUCKETS)
    monkeypatch.setattr("llmctl.runtime.rounds.verification.MAX_GRAPHS", 48)


def settle(loop) -> int:
    """Everything that is done while there are no requests; how much it was."""
    count = 0
    while loop.prepare_more():
        count += 1
        assert count < 200, "it never ends"
    return count


def run(fake, harness, requests) -> None:
    """To the end, with the text that each has alone."""
    sequences = [harness.add(request) for request in requests]
    harness.run()
    for request, sequence in zip(requests, sequences, strict=True):
        wanted, _ = fake.plain_answer(harness.oracle, request)
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted


def greedy(count: int, max_tokens: int):
    return [
        replace(make_request(index, max_tokens), sampling_config=SamplingConfig())
        for index in range(count)
    ]


def test_every_bucket_is_listed_once() -> None:
    limits = StepLimits(8, 8, 4, 100, 0, 4, "bfloat16")
    found = kv_buckets(limits)
    assert found == [16, 24, 32, 64, 100]
    assert {kv_bucket(length, limits) for length in range(1, 101)} == set(found)


@pytest.mark.parametrize("with_draft", [True, False], ids=["draft", "plain"])
def test_a_load_captures_nothing_once_the_executor_has_settled(
    fake, make_engine, with_draft
) -> None:
    """Batches of every size, contexts from the first bucket to the last."""
    device = Device(make_engine, with_draft, lengths=() if with_draft else (0,))
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    harness.oracle = fake.Engine()
    device.runner.prepare(8, 0)
    assert settle(harness.loop) > 8
    captured = device.capture.num_captured
    assert harness.loop.num_captured == captured
    for count in (1, 4, 3, 2):
        run(fake, harness, greedy(count, 40))
    assert device.capture.num_captured == captured
    assert settle(harness.loop) == 0  # nothing is done twice


def test_pairs_of_a_load_are_captured_for_longer_contexts(fake, make_engine) -> None:
    """With adaptive lengths, whose graphs for short contexts are there before the first request."""
    device = Device(make_engine, lengths=(0, 1, DRAFT_LEN))
    harness = fake.Harness(
        *(device.target, device.drafter),
        draft=device.draft,
        runner=device.runner,
        draft_lengths=Lengths((DRAFT_LEN,)),
    )
    harness.oracle = fake.Engine()
    device.runner.prepare(4, 0)
    assert settle(harness.loop) == 0  # no length is likelier than another
    run(fake, harness, greedy(2, 6))
    limits = device.target.program.limits
    assert 1 <= settle(harness.loop) <= 3 * len(kv_buckets(limits))  # batches of 1, 2 and 4
    captured = device.capture.num_captured
    run(fake, harness, greedy(4, 40))
    assert device.capture.num_captured == captured


def test_ways_of_drawing_are_captured_once_requests_had_them(fake, make_engine) -> None:
    device = Device(make_engine, with_draft=False, lengths=(0,))
    harness = fake.Harness(device.target, device.drafter, runner=device.runner)
    harness.oracle = fake.Engine()
    device.runner.prepare(4, 0)
    settle(harness.loop)
    run(fake, harness, [make_request(1, 5)])  # all ids may be drawn
    settle(harness.loop)
    captured = device.capture.num_captured
    run(fake, harness, [make_request(index, 40) for index in (1, 4, 7)])
    assert device.capture.num_captured == captured


def test_no_graph_is_dropped_for_one_that_may_be_needed(fake, make_engine, monkeypatch) -> None:
    monkeypatch.setattr("llmctl.runtime.rounds.verification.MAX_GRAPHS", 6)
    device = Device(make_engine, with_draft=False)
    harness = fake.Harness(device.target, device.drafter, runner=device.runner)
    harness.oracle = fake.Engine()
    run(fake, harness, greedy(3, 9))
    before = set(device.runner._verify_graphs._graphs)
    settle(harness.loop)
    assert before < set(device.runner._verify_graphs._graphs)
    gc.collect()
    assert len(device.capture.alive) <= 6
    run(fake, harness, greedy(8, 30))


@pytest.mark.parametrize("kind", ["medusa", "lookahead"])
def test_drafts_of_heads_and_windows_are_right_after_an_idle_time(
    fake, make_engine, kind: str
) -> None:
    device = (
        MedusaDevice(MedusaTree(((0,), (1,), (0, 0))), right_rank=1, agreement=0.8)
        if kind == "medusa"
        else LookaheadDevice((3, 3, 3))
    )
    harness = device.harness()
    for count in (3, 2):
        settle(harness.loop)
        captured = device.capture.num_captured
        run(fake, harness, greedy(count, 30))
        assert device.capture.num_captured == captured


def test_an_executor_settles_and_serves_whoever_comes_meanwhile(make_engine) -> None:
    device = Device(make_engine, with_draft=False, lengths=(0,))
    with device.executor() as executor:
        first = list(executor.generate((3, 1, 4), max_tokens=20))
        assert executor.settle(30)
        captured = executor.num_graphs_captured
        assert captured == device.capture.num_captured > 4
        again = list(executor.generate((3, 1, 4), max_tokens=20))
        assert again == first and executor.num_graphs_captured == captured
        assert executor.settle(30)


def test_an_executor_without_rounds_settles_at_once(fake) -> None:
    from llmctl.plugins.ops.sampling.reference import ReferenceSampling
    from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig

    config = ExecutorConfig(KvCacheConfig(num_blocks=50))
    with Executor(fake.Engine(), None, config, ReferenceSampling()) as executor:
        assert executor.settle(10) and executor.num_graphs_captured == 0
