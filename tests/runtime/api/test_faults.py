"""A failure injected at the N-th call into engines, drafter, sampling or device, for N = 1, 2, ...
until none fires: every request ends, memory returns, and the next request is right."""

from __future__ import annotations

import itertools

import pytest
from support.tiny_pair import DRAFT_LEN, MAX_SEQ_LEN, build_pair

from llmctl.errors import DeviceFailure, OutOfMemory
from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.request import FinishReason, OutputConfig, Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

WAIT_S = 30.0
MOST_CALLS = 600
ERRORS = (DeviceFailure("a kernel failed"), OutOfMemory("nothing is left"))  # in turn


class Faults:
    """Counts calls of what it wraps and raises at one of them."""

    def __init__(self) -> None:
        self.error: Exception = ERRORS[0]
        self.num_calls = 0
        self.fail_at = 0  # never

    def wrap(self, owner: object, *names: str):
        """`owner` with these methods counted."""
        faults = self

        class Wrapped:
            def __getattr__(self, name: str):
                found = getattr(owner, name)
                if name not in names:
                    return found

                def counted(*arguments, **keywords):
                    faults.num_calls += 1
                    if faults.num_calls == faults.fail_at:
                        raise faults.error
                    return found(*arguments, **keywords)

                return counted

        return Wrapped()

    def arm(self, number: int) -> None:
        self.num_calls, self.fail_at = 0, number
        if number:
            self.error = ERRORS[number % len(ERRORS)]

    @property
    def has_fired(self) -> bool:
        return 0 < self.fail_at <= self.num_calls


def requests(prompt: tuple[int, ...], max_tokens: int) -> list[Request]:
    """Shared beginnings, several returns, drawn and greedy, with log-probs and without."""
    return [
        Request(prompt, max_tokens),
        Request((*prompt[:-1], 7), max_tokens, SamplingConfig(top_k=5, seed=3)),
        Request(prompt, max_tokens, SamplingConfig(top_k=0, num_return_sequences=2, seed=1)),
        Request(prompt[::-1], max_tokens, output_config=OutputConfig(return_log_probs=True)),
        Request((*prompt, 3), max_tokens, streaming=True),
    ]


def run_all(executor: Executor, wanted: list[Request]) -> list[dict[int, tuple] | Exception]:
    """What became of each: tokens by sequence, or the error."""
    ends = []
    for request_id in executor.enqueue_requests(wanted):
        tokens: dict[int, tuple] = {}
        while True:
            got = executor.await_responses(request_id, WAIT_S)
            assert got, "a request that does not end"
            for response in got:
                if response.result is None:
                    continue
                index = response.result.sequence_index
                tokens[index] = tokens.get(index, ()) + response.result.output_token_ids
                assert response.result.finish_reason is not FinishReason.CANCELLED
            if got[-1].result is None or got[-1].result.is_final:
                ends.append(got[-1].error or tokens)
                break
    return ends


def inject_everywhere(faults: Faults, make, prompt: tuple[int, ...], max_tokens: int) -> int:
    """The number of calls at which a failure was injected."""
    todo = requests(prompt, max_tokens)
    faults.arm(0)
    with make() as executor:
        right = run_all(executor, todo)
    assert not any(isinstance(end, Exception) for end in right)
    num_spared = 0
    for number in itertools.count(1):
        assert number < MOST_CALLS
        with make() as executor:
            faults.arm(number)
            ends = run_all(executor, todo)
            for end, answer in zip(ends, right, strict=True):
                assert end is faults.error or end == answer
            num_failed = sum(end is faults.error for end in ends)
            num_spared += 0 < num_failed < len(ends)
            if not faults.has_fired:
                assert num_failed == 0
                assert num_spared > 0, "a failure never spared anybody"
                return number - 1
            assert num_failed > 0
            faults.arm(0)
            assert run_all(executor, todo) == right
            worker = executor._worker
            assert worker.kv_cache.stats().used_num_blocks == 0
            worker.kv_cache.check_invariants()
            assert not worker._active and not worker._sampler._counts
    raise AssertionError


@pytest.mark.parametrize("method", ["plain", "draft", "adaptive", "rounds", "behind"])
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_whatever_call_fails_every_request_ends_and_the_next_is_right(fake, method, policy):
    faults = Faults()
    sampling = faults.wrap(ReferenceSampling(), "argmax", "sample_rows", "log_softmax_at")

    def make() -> Executor:
        is_behind = method == "behind"
        engine = fake.Engine(
            max_batch_size=3, max_num_tokens=16, steps_to_land=2, is_asynchronous=is_behind
        )
        draft_engine = fake.Engine(agreement=0.7, steps_to_land=1)
        target = faults.wrap(engine, "run", "copy_blocks")
        draft = faults.wrap(draft_engine, "run", "copy_blocks")
        drafter = None if method in ("plain", "behind") else DraftEngineDrafter(draft, 3)
        runner = None
        if method in ("rounds", "behind"):
            runner = fake.Runner(engine, *((None, 0) if is_behind else (draft_engine, 3)))
            runner = faults.wrap(runner, "begin", "enqueue", "collect")
        config = ExecutorConfig(
            KvCacheConfig(16, num_host_blocks=8),
            scheduler=SchedulerConfig(CapacitySchedulerPolicy(policy)),
            adaptive_draft_len=method in ("adaptive", "rounds"),
            check_invariants=True,
        )
        return Executor(target, drafter, config, sampling, runner)

    num_calls = inject_everywhere(faults, make, tuple(range(14)), 7)
    assert num_calls > 15


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return build_pair(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("method", ["plain", "draft"])
def test_a_real_engine_goes_on_after_a_failure_at_any_call(pair, method):
    faults = Faults()
    target, draft = (faults.wrap(engine, "run", "copy_blocks") for engine in pair)
    sampling = faults.wrap(CpuSampling(), "argmax", "sample_rows", "log_softmax_at")

    def make() -> Executor:
        drafter = DraftEngineDrafter(draft, DRAFT_LEN) if method == "draft" else None
        config = ExecutorConfig(KvCacheConfig(MAX_SEQ_LEN // 16), check_invariants=True)
        return Executor(target, drafter, config, sampling)

    num_calls = inject_everywhere(faults, make, tuple(range(2, 122)), 6)
    assert num_calls > 10
