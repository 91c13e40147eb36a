"""Random traffic for long: no leak, flat memory, and every answer the one it gets alone.

`--soak-requests 10000` is the full soak, of 10,000 requests an engine; a plain test run does a
hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.load import differences, random_requests, run_alone, run_under_load
from support.tiny_heads import METHODS, build_with_heads
from support.tiny_pair import DRAFT_LEN, MAX_SEQ_LEN, VOCAB, build_pair

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.growth.growth import DynamicShape
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import Request
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig
from llmctl.runtime.stats.process_memory import cpu_bytes

WAVE = 50  # requests between two looks at what is left
MOST_GROWTH = 24 << 20  # bytes of RAM from the third wave on: allocators keep some
FAKE_VOCAB = 23
DRAFT_LIMITS = [*[None] * 50, 0, 0, 1, 2, 3, 9]  # of requests


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return build_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def num_requests(request) -> int:
    """Of one test of an engine."""
    return int(request.config.getoption("--soak-requests"))


def traffic(
    generator: np.random.Generator, vocab: int, count: int, longest: int
) -> Iterator[list[Request]]:
    """Waves of requests with shared beginnings, priorities and draft limits of their own."""
    text = generator.integers(2, vocab, 4000).tolist()

    def prompt(start: int, length: int) -> tuple[int, ...]:
        return tuple(text[start : start + min(length, longest)])

    for _ in range(max(1, count // WAVE)):
        requests = random_requests(generator, prompt, vocab, WAVE)
        yield [
            replace(
                request,
                max_tokens=min(request.max_tokens, longest // 3),
                priority=float(generator.choice([0.0, 0.5, 0.5, 1.0])),
                max_draft_len=DRAFT_LIMITS[generator.integers(len(DRAFT_LIMITS))],
            )
            for request in requests
        ]


def soak(executor: Executor, waves, answers, generator: np.random.Generator) -> None:
    """Every wave is answered as alone, leaves nothing behind, and memory stays flat."""
    after_third = None
    for number, (requests, wanted) in enumerate(zip(waves, answers, strict=True)):
        found = run_under_load(executor, requests, generator)
        assert differences(requests, found, wanted) == []
        worker = executor._worker
        assert executor.await_responses(timeout_s=0.01) == []
        assert not worker.scheduler.has_work and not worker._active
        assert worker.kv_cache.stats().used_num_blocks == 0
        assert not worker._sampler._counts and not executor._mailbox._open
        if number == 2:
            after_third = cpu_bytes()
    if after_third is not None:
        assert cpu_bytes() - after_third <= MOST_GROWTH


POLICIES = [
    SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
    SchedulerConfig(
        CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, ContextChunkingPolicy.EQUAL_PROGRESS
    ),
    SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH),
]


@pytest.mark.parametrize("policy", range(3))
@pytest.mark.parametrize("method", ["none", "draft", "tree", "adaptive", "rounds", "behind"])
def test_fakes_under_random_traffic_answer_as_they_do_alone(fake, num_requests, policy, method):
    generator = np.random.default_rng([policy, len(method)])

    class Engine(fake.Engine):
        """Forgets the rows it has computed, so that memory is flat."""

        def logits(self, tokens):
            if len(self._rows) > 2000:
                self._rows.clear()
            return super().logits(tokens)

    # behind: what a step brought is delivered while the next one runs
    target = Engine(steps_to_land=3, is_asynchronous=method == "behind")
    draft = Engine(agreement=0.7, steps_to_land=2)
    tree = DynamicShape(num_offers=3, width=2, depth=4) if method == "tree" else None
    drafter = None
    if method not in ("none", "behind"):
        drafter = DraftEngineDrafter(draft, 8 if method == "tree" else 4, tree)
    runner = fake.Runner(target, draft, 4) if method == "rounds" else None
    if method == "behind":
        runner = fake.Runner(target, None, 0)
    is_small = policy == 0
    config = ExecutorConfig(
        KvCacheConfig(30 if is_small else 100, num_host_blocks=20 if policy == 1 else 0),
        scheduler=POLICIES[policy],
        adaptive_draft_len=method in ("adaptive", "rounds"),
        check_invariants=True,
    )
    waves = list(traffic(generator, FAKE_VOCAB, num_requests // 6, longest=80))
    sampling = ReferenceSampling()
    alone = ExecutorConfig(KvCacheConfig(40, enable_block_reuse=False))
    with Executor(Engine(), None, alone, sampling) as quiet:
        answers = [run_alone(quiet, requests) for requests in waves]
    with Executor(target, drafter, config, sampling, runner) as executor:
        soak(executor, waves, answers, generator)


@pytest.mark.parametrize("method", ["draft", "tree", "ngram"])
def test_an_engine_under_random_traffic_answers_as_it_does_alone_in_flat_memory(
    pair, num_requests, method
):
    target, draft = pair
    drafter = NgramDrafter(DRAFT_LEN)
    if method != "ngram":  # the draft engine has a row for each request
        tree = DynamicShape(num_offers=3, width=1, depth=3) if method == "tree" else None
        drafter = DraftEngineDrafter(draft, DRAFT_LEN, tree)
    config = ExecutorConfig(
        KvCacheConfig(3 * MAX_SEQ_LEN // 16),
        scheduler=POLICIES[0],
        adaptive_draft_len=method == "draft",
        max_step_ms="auto",
        check_invariants=True,
    )
    soak_engine(target, drafter, config, num_requests, np.random.default_rng(len(method)))


@pytest.mark.parametrize("policy", range(2))
@pytest.mark.parametrize("mode", METHODS)
def test_an_engine_with_heads_under_random_traffic_answers_as_it_does_alone_in_flat_memory(
    tmp_path, num_requests, mode, policy
):
    """Half with few blocks, which they take from one another; half with a host tier and chunks of
    equal size."""
    target = build_with_heads(tmp_path, mode)
    draft_len = target.config.build_config["max_draft_len"]
    drafter = METHODS[mode].make_drafter({"target": target}, draft_len)
    num_blocks = 3 * MAX_SEQ_LEN // 16
    config = ExecutorConfig(
        KvCacheConfig(num_blocks, num_host_blocks=20 if policy == 1 else 0),
        scheduler=POLICIES[policy],
        max_step_ms="auto",
        check_invariants=True,
    )
    generator = np.random.default_rng([len(mode), policy])
    soak_engine(target, drafter, config, num_requests // 2, generator)


def soak_engine(target, drafter, config, num_requests, generator: np.random.Generator) -> None:
    """The same requests without drafts, one at a time, and then with them and all together."""
    sampling = CpuSampling()
    alone = ExecutorConfig(KvCacheConfig(MAX_SEQ_LEN // 16, enable_block_reuse=False))
    waves = list(traffic(generator, VOCAB, num_requests, longest=400))
    with Executor(target, None, alone, sampling) as quiet:  # one at a time: they share the engine
        answers = [run_alone(quiet, requests) for requests in waves]
    with Executor(target, drafter, config, sampling) as executor:
        soak(executor, waves, answers, generator)
        stats = executor.get_speculation_stats()
        # By measured cost: on a busy machine a few are tried, and then none.
        adapts = config.adaptive_draft_len
        assert (stats.draft_tokens if adapts else stats.accepted_tokens) > 0
