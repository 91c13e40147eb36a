"""The runner of device rounds on a device made of fakes: its tokens, its graphs, its failures.

The bookkeeping kernels are their references; forward passes are the fake engine's, from what lies
in the step's arrays.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cuda import FakeCapture, FakeGraph, bookkeeping_by_reference, launch_sampling

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.backends.cuda.kernel_spec import DeviceStep, StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceQueue, HostEvent
from llmctl.plugins.device_loop.state import RoundState
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.request import FinishReason, Request, SamplingConfig
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.rounds.upload import state_bytes
from llmctl.runtime.rounds.verification import graph_launches

DRAFT_LEN = 3
BROKEN = "CUDA error: an illegal memory access was encountered"


class Program:
    """A fake engine behind the interface of a program; `fail` is raised by the next launch."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.limits = StepLimits(
            max_num_tokens=engine.max_num_tokens,
            max_num_rows=engine.max_num_rows,
            max_batch_size=engine.max_batch_size,
            max_seq_len=engine.max_seq_len,
            max_draft_len=engine.max_draft_len,
            tokens_per_block=engine.tokens_per_block,
            kv_dtype="bfloat16",
        )

        def stale(*shape: int) -> torch.Tensor:
            return torch.full(shape, 10**6, dtype=torch.int32)

        limits = self.limits
        blocks = -(-limits.max_seq_len // limits.tokens_per_block)
        self.step = DeviceStep(
            token_ids=stale(limits.max_num_tokens),
            position_ids=stale(limits.max_num_tokens),
            cu_q=stale(limits.max_batch_size + 1),
            kv_len=stale(limits.max_batch_size),
            block_tables=stale(limits.max_batch_size, blocks),
            slot_mapping=stale(limits.max_num_tokens),
            logit_rows=stale(limits.max_num_rows),
        )
        self.num_launches = 0
        self.fail: Exception | None = None

    def enqueue(self, shape, stream: int) -> None:
        """Every row's logits follow from the tokens cached before it, as far as blocks go."""
        self.num_launches += 1
        step, engine = self.step, self.engine
        cu_q = step.cu_q[: shape.num_requests + 1].numpy()
        slots = step.slot_mapping[: cu_q[-1]].numpy()
        tokens = np.minimum(step.token_ids[: cu_q[-1]].numpy(), engine.vocab_size - 1)
        engine.cache[slots[slots >= 0]] = tokens[slots >= 0]
        for index, row in enumerate(step.logit_rows[: shape.num_rows].tolist()):
            engine.logits[index] = 0.0
            if row >= cu_q[-1] or slots[row] < 0:
                continue
            request = int(np.searchsorted(cu_q, row, side="right")) - 1
            table = step.block_tables[request].numpy()
            found = engine.logits_after(engine.read(table, int(step.position_ids[row]) + 1))
            engine.logits[index] = torch.from_numpy(found)

    def launch(self, launches, stream: int) -> None:
        if self.fail is not None:
            raise self.fail
        self.num_launches += len(launches)
        for launch in launches:
            if callable(launch):
                launch()
            else:
                launch_sampling(launch)


@pytest.fixture
def make_engine(fake, monkeypatch):
    """A fake engine that also has what a runner asks of a CudaEngine."""

    for place in ("rounds.verification", "drafting.draft_engine.device"):
        monkeypatch.setattr(f"llmctl.runtime.{place}.bookkeeping", bookkeeping_by_reference())

    class DeviceEngine(fake.Engine):
        def __init__(self, queue: DeviceQueue, **rest) -> None:
            super().__init__(max_draft_len=DRAFT_LEN, **rest)
            self.logits_after = super().logits
            self.queue = queue
            self.max_num_rows = self.max_batch_size * (DRAFT_LEN + 1)
            self.logits = torch.zeros(self.max_num_rows, self.vocab_size)
            self.program = Program(self)
            self.is_capturable = lambda: True

        def run(self, step) -> np.ndarray:
            logits, self.logits = self.logits, self.logits_after
            try:
                return super().run(step)
            finally:
                self.logits = logits

        def feed(self, step) -> None:
            assert not len(step.logit_rows)
            self.run(step)

        def prepare_prompts(self, max_num_tokens: int) -> None:
            pass

    return DeviceEngine


class Capture(FakeCapture):
    """Counts launches of each graph; keeps none alive."""

    def __init__(self, programs) -> None:
        super().__init__()
        self.programs = programs
        self.num_captured = 0
        self.alive: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.launches: weakref.WeakKeyDictionary[FakeGraph, int] = weakref.WeakKeyDictionary()
        self.drafting: weakref.WeakSet[FakeGraph] = weakref.WeakSet()  # those of the last program

    def __call__(self, record) -> FakeGraph:
        before = [program.num_launches for program in self.programs]
        graph = Hashed(record)
        self.num_captured += 1
        self.alive.add(graph)
        saved = [program.launch for program in self.programs]
        for program in self.programs:  # nothing is executed while capturing
            program.launch = _count(program)
            program.enqueue = _count_one(program)
        record()
        for program, launch in zip(self.programs, saved, strict=True):
            del program.enqueue
            program.launch = launch
        added = [p.num_launches - count for p, count in zip(self.programs, before, strict=True)]
        self.launches[graph] = sum(added)
        if len(added) > 1 and added[1]:
            self.drafting.add(graph)
        return graph

    def launches_alive(self, is_draft: bool) -> list[int]:
        """Of each graph of drafting, or of verification."""
        return [
            count for graph, count in self.launches.items() if (graph in self.drafting) == is_draft
        ]


class Hashed(FakeGraph):
    """A graph that weak collections can hold."""

    __hash__ = object.__hash__


def _count(program: Program):
    def launch(launches, stream: int) -> None:
        program.num_launches += len(launches)

    return launch


def _count_one(program: Program):
    def enqueue(shape, stream: int) -> None:
        program.num_launches += 1

    return enqueue


class Device:
    """Target, draft, drafter and the runner, on one queue."""

    def __init__(self, make_engine, with_draft: bool = True, lengths=(), **draft) -> None:
        self.queue = DeviceQueue("cpu")
        self.target = make_engine(self.queue)
        self.draft = make_engine(self.queue, agreement=0.8, **draft) if with_draft else None
        self.drafter = DraftEngineDrafter(self.draft, DRAFT_LEN) if self.draft else None
        engines = [self.target] + ([self.draft] if self.draft else [])
        self.capture = Capture([engine.program for engine in engines])
        drafts = DeviceDraftEngine(self.draft, DRAFT_LEN) if self.draft else NoDeviceDrafter()
        self.runner = CudaRoundRunner(self.target, drafts, self.capture, lengths=lengths)

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        config = ExecutorConfig(KvCacheConfig(num_blocks=200), check_invariants=True)
        sampling = ReferenceSampling()
        with Executor(self.target, self.drafter, config, sampling, self.runner) as executor:
            yield executor


@pytest.fixture(params=[True, False], ids=["draft", "plain"])
def device(request, make_engine) -> Device:
    return Device(make_engine, request.param)


def make_request(index: int = 0, max_tokens: int = 12, **rest) -> Request:
    prompt = tuple((7 * index + i * i) % 23 for i in range(3 + index))
    params = [
        SamplingConfig(),
        SamplingConfig(temperature=0.9, top_k=0, seed=2**63 + index),
        SamplingConfig(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, seed=index),
    ][index % 3]
    return Request(prompt, max_tokens, params, **rest)


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


class Lengths:
    """0 to 3 drafts for everybody, decided anew before every round, or those of `choices`."""

    beside_prompts = True

    def __init__(self, choices=range(DRAFT_LEN + 1), seed: int = 1) -> None:
        self.common: int | None = 0
        self.choices = tuple(choices)
        self.chance = random.Random(seed)

    def plan(self, generation) -> None:
        self.common = self.chance.choice(self.choices)

    def of(self, sequence) -> int:
        return self.common


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


def test_the_memory_plan_counts_the_requests_state():
    state = RoundState.allocate(8, 10, "cpu")
    tensors = [state.root, state.previous, state.committed, state.max_len, state.capacity]
    tensors += [state.drafts, state.targets, state.counter]
    tensors += [getattr(state.sampling, name) for name in state.sampling.__slots__]
    assert state_bytes(8, 10) == sum(t.numel() * t.element_size() for t in tensors)


def first_error(executor: Executor, request: Request) -> Exception:
    """The error that ends a request, whatever it had produced before."""
    number = executor.enqueue_request(request)
    while True:
        for response in executor.await_responses(number, timeout_s=60):
            if response.error is not None:
                return response.error
            assert response.result is not None and not response.result.is_final


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (DeviceFailure("the driver refused a launch", fix="start again"), DeviceFailure),
        (RuntimeError(BROKEN), DeviceFailure),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
    ],
    ids=["driver", "torch", "memory"],
)
def test_a_launch_that_fails_ends_its_requests_by_name_and_no_others(fake, device, raised, wanted):
    with device.executor() as executor:
        device.target.program.fail = raised
        error = first_error(executor, make_request(streaming=True))
        assert isinstance(error, wanted) and error.fix and str(raised).splitlines()[0] in str(error)
        device.target.program.fail = None
        number = executor.enqueue_request(make_request())
        (response,) = executor.await_responses(number, timeout_s=60)
        tokens = tuple(fake.plain_answer(fake.Engine(), make_request())[0])
        assert response.result is not None and response.result.output_token_ids == tokens
        assert executor.get_latest_iteration_stats()[-1].kv_cache_stats.used_num_blocks == 0


class LostEvent(HostEvent):
    """What every wait says after a kernel failed."""

    def synchronize(self) -> None:
        raise RuntimeError(f"{BROKEN}\nCUDA kernel errors might be asynchronously reported")


def test_a_lost_device_ends_all_requests_by_name_and_the_executor_closes(device, monkeypatch):
    with device.executor() as executor:
        monkeypatch.setattr(device.queue, "make_event", LostEvent)
        numbers = executor.enqueue_requests([make_request(i, streaming=True) for i in range(3)])
        waiting = set(numbers)
        while waiting:
            for response in executor.await_responses(timeout_s=60):
                if response.error is None:
                    continue
                assert isinstance(response.error, DeviceFailure)
                assert BROKEN in str(response.error) and "\n" not in str(response.error)
                waiting.remove(response.request_id)

        def lost() -> None:
            raise DeviceFailure(BROKEN)

        monkeypatch.setattr(device.queue, "synchronize", lost)  # not even that works any more
        assert isinstance(first_error(executor, make_request(streaming=True)), DeviceFailure)
    assert not executor.can_enqueue_requests()


def test_a_round_that_fails_while_another_is_in_flight_drops_both(fake, device):
    harness = fake.Harness(device.target, device.drafter, draft=device.draft, runner=device.runner)
    sequence = harness.add(make_request(max_tokens=30))
    for _ in range(3):
        harness.step()
    device.target.program.fail = RuntimeError(BROKEN)
    # Replays do not launch one by one: the next shape does.
    harness.add(make_request(1))
    with pytest.raises(DeviceFailure, match="illegal memory access"):
        harness.run()
    assert not harness.rounds.has_result
    device.target.program.fail = None
    for victim in list(harness.scheduler.active):
        harness.cancel(victim)
    assert harness.kv_cache.stats().used_num_blocks == 0
    again = harness.add(make_request(max_tokens=30))
    harness.run()
    assert again.tokens == sequence.tokens[:3] + fake.plain_answer(fake.Engine(), again.request)[0]
