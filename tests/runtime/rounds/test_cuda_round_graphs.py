"""CUDA graphs of device rounds: which are captured, how many are kept, what they take."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cuda_rounds import (
    DRAFT_LEN,
    Device,
    Lengths,
    make_request,
)

from llmctl.plugins.backends.cuda.queue import HostEvent
from llmctl.plugins.device_loop.state import RoundState
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.rounds.upload import state_bytes
from llmctl.runtime.rounds.verification import graph_launches


def test_graphs_of_adaptive_lengths_are_there_before_the_first_request(fake, make_engine):
    device = Device(make_engine, lengths=(0, 1, DRAFT_LEN))
    harness = fake.Harness(
        device.target,
        device.drafter,
        draft=device.draft,
        runner=device.runner,
        draft_lengths=Lengths((0, 1, DRAFT_LEN)),
    )
    device.runner.prepare(4, 0)
    captured = device.capture.num_captured
    assert captured == 3 * (3 + 2)  # batches of 1, 2 and 4
    requests = [replace(make_request(i, 50), sampling_config=SamplingConfig()) for i in range(4)]
    sequences = [harness.add(request) for request in requests]
    harness.run()
    assert device.capture.num_captured == captured
    for request, sequence in zip(requests, sequences, strict=True):
        wanted, _ = fake.plain_answer(fake.Engine(), request)
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
    for steps, ahead in ((1, [1] * 9), (DRAFT_LEN, [0, 1, DRAFT_LEN] * 3)):
        launches = device.capture.launches_alive(steps > 1)
        assert sum(launches) <= graph_launches(1, steps, 2, ahead)


@pytest.mark.parametrize(
    ("size", "in_rounds"),
    [({"max_seq_len": 40}, True), ({"max_num_tokens": 8}, True), ({"max_num_tokens": 7}, False)],
    ids=str,
)
def test_a_draft_engine_may_be_made_for_less_than_the_target(fake, make_engine, size, in_rounds):
    """Fewer tokens than the target's (drafting stops there), or in a step: the first one of a round
    has two of each request, here of 4 and of 3, which are padded to 4."""
    device = Device(make_engine, **size)
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    requests = [make_request(i, 50 + i) for i in range(4)]
    sequences = [harness.add(request) for request in requests]
    harness.run()
    for request, sequence in zip(requests, sequences, strict=True):
        wanted, _ = fake.plain_answer(fake.Engine(), request)
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
    batches = {shape.batch for shape in device.runner._verify_graphs._graphs}
    assert (4 in batches) == in_rounds and batches


def test_as_many_ids_as_an_int64_counts_may_be_asked_for(fake, make_engine):
    device = Device(make_engine, with_draft=False)
    harness = fake.Harness(device.target, device.drafter, runner=device.runner)
    params = SamplingConfig(temperature=0.8, seed=3)
    several = [replace(params, top_k=top_k) for top_k in (5, 0, 2**31, 2**62)]
    sequences = [harness.add(Request((3, 1, 4), 9, each)) for each in several]
    harness.run()
    tokens = [sequence.tokens for sequence in sequences]
    assert tokens[1] == tokens[2] == tokens[3] and device.capture.num_captured


def test_an_executor_that_ended_is_freed_with_its_graphs_at_once(make_engine):
    device = Device(make_engine)
    with device.executor() as executor:
        executor.await_responses(executor.enqueue_request(make_request()), 30)
    graphs = device.capture.alive
    assert graphs
    runner = weakref.ref(device.runner)
    gc.disable()  # a garbage collection comes late: the next executor freezes what there is
    try:
        device.capture = device.runner = executor = None
        assert runner() is None and not graphs
    finally:
        gc.enable()


@pytest.mark.parametrize("with_draft", [True, False], ids=["draft", "plain"])
def test_graphs_are_few_and_no_larger_than_the_memory_plan_says(
    fake, make_engine, monkeypatch, with_draft
):
    monkeypatch.setattr("llmctl.runtime.rounds.verification.MAX_GRAPHS", 4)
    device = Device(make_engine, with_draft)
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    # batches of up to 1, 2, 4 and 8 requests, all greedy or mixed
    for indices in ((0,), (1,), (0, 3), (1, 3), (0, 3, 6, 9), (1, 2, 3, 4), range(8), (0,)):
        for index in indices:
            harness.add(make_request(index))
        harness.run()
        gc.collect()
        assert len(device.capture.alive) <= 4
        has_draft = device.draft is not None
        planned = graph_launches(1, 1, 1 + has_draft)  # the fakes' forward pass is one launch
        if has_draft:
            planned += graph_launches(1, DRAFT_LEN, 2)
        assert sum(device.capture.launches.values()) <= planned
    assert device.capture.num_captured > 4


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    max_graphs=st.sampled_from([2, 4, 6]),
    choices=st.sets(st.integers(0, DRAFT_LEN), min_size=1),
    batches=st.lists(st.integers(1, 8), min_size=3, max_size=5),
    seed=st.integers(0, 99),
)
def test_adaptive_lengths_keep_each_engines_graphs_within_its_plan(
    fake, make_engine, monkeypatch, max_graphs, choices, batches, seed
):
    monkeypatch.setattr("llmctl.runtime.rounds.verification.MAX_GRAPHS", max_graphs)
    device = Device(make_engine)
    harness = fake.Harness(
        device.target,
        device.drafter,
        draft=device.draft,
        runner=device.runner,
        draft_lengths=Lengths(sorted(choices), seed),
    )
    capture = device.capture
    for count in batches:
        for index in range(count):
            harness.add(make_request(index))
        while harness.scheduler.has_work:
            harness.step()
            for is_draft, steps in ((False, 1), (True, DRAFT_LEN)):
                launches = capture.launches_alive(is_draft)
                assert sum(launches) <= graph_launches(1, steps, 2)
                assert is_draft or len(launches) <= max_graphs // 2


@pytest.mark.parametrize(("with_draft", "wanted"), [(True, 3), (False, 2)], ids=["draft", "plain"])
def test_a_round_has_no_event_where_nothing_is_between_it_and_another(
    fake, make_engine, monkeypatch, with_draft, wanted
):
    """Each takes time of the device between two graphs."""
    made, recorded = [], []

    class Counted(HostEvent):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def record(self) -> None:
            recorded.append(self)
            super().record()

    device = Device(make_engine, with_draft)
    monkeypatch.setattr(device.queue, "make_event", Counted)
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    harness.add(make_request(0, 40))
    rounds = []
    monkeypatch.setattr(
        device.runner,
        "enqueue",
        lambda *given, run=device.runner.enqueue: rounds.append(run(*given)),
    )
    harness.run()
    assert len(rounds) > 4 and len(recorded) == wanted * len(rounds)
    assert len(made) <= 2 * wanted, "events of finished rounds are used again"


def test_the_memory_plan_counts_the_requests_state():
    state = RoundState.allocate(8, 10, "cpu")
    tensors = [state.root, state.previous, state.committed, state.max_len, state.capacity]
    tensors += [state.num_read, state.drafts, state.targets, state.counter]
    tensors += [getattr(state.sampling, name) for name in state.sampling.__slots__]
    assert state_bytes(8, 10) == sum(t.numel() * t.element_size() for t in tensors)
