"""What users of TensorRT-LLM's executor find here beside the answers: asyncio, draining, limits of
the executor's own, and figures of requests and steps."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from llmctl.errors import BadConfig, ExecutorClosed, QueueFull
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.async_executor import AsyncExecutor
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.request import FinishReason, OutputConfig, Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

PROMPT = (3, 1, 4, 1, 5)
WAIT_S = 30.0


@pytest.fixture
def make(fake):
    made = []

    def make(target=None, drafter=None, **rest) -> Executor:
        config = ExecutorConfig(KvCacheConfig(200), check_invariants=True, **rest)
        made.append(Executor(target or fake.Engine(), drafter, config, ReferenceSampling()))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
        assert executor._worker.kv_cache.stats().used_num_blocks == 0


def stream(index: int = 0, max_tokens: int = 20, **rest) -> Request:
    return Request((index, *PROMPT), max_tokens, streaming=True, **rest)


# ---- asyncio ----


def test_tokens_arrive_one_by_one_for_many_readers_of_one_event_loop(fake, make):
    executor = AsyncExecutor(make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.7), 3)))

    async def read(index: int) -> list[int]:
        return [token async for token in executor.generate(stream(index))]

    async def main():
        return await asyncio.gather(*(read(index) for index in range(6)))

    for index, tokens in enumerate(asyncio.run(main())):
        assert tokens == fake.plain_answer(fake.Engine(), stream(index))[0]
    assert executor.executor.get_num_responses_ready() == 0  # none of them went to the mailbox


def test_a_reader_that_stops_early_cancels_its_request(fake, make):
    executor = make(fake.Engine(max_seq_len=4096))

    async def main() -> None:
        face = AsyncExecutor(executor)
        async with aclosing(face.generate(stream(max_tokens=700))) as tokens:
            async for _ in tokens:
                break
        await face.shutdown(drain=True)

    asyncio.run(main())
    steps = executor.get_latest_iteration_stats()
    assert 1 <= len(steps) < 700


def test_a_failure_and_a_refusal_reach_the_asyncio_reader(fake, make):
    target = fake.Engine()
    target.fail_at = 3
    executor = AsyncExecutor(make(target))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="the engine broke"):
            async for _ in executor.generate(stream()):
                pass
        (response,) = await executor.result(Request(PROMPT, 3))
        assert len(response.result.output_token_ids) == 3
        with pytest.raises(BadConfig, match="streaming"):
            await anext(executor.generate(Request(PROMPT, 3)))
        with pytest.raises(BadConfig, match="num_return_sequences is 2"):
            sampling = SamplingConfig(num_return_sequences=2)
            await anext(executor.generate(stream(sampling_config=sampling)))
        await executor.shutdown()
        with pytest.raises(ExecutorClosed):
            await executor.result(Request(PROMPT, 3))

    asyncio.run(main())


# ---- the end ----


class Gated:
    """Steps wait for the gate."""

    def __init__(self, engine) -> None:
        self.gate, run = threading.Event(), engine.run

        def waiting_run(step):
            assert self.gate.wait(WAIT_S)
            return run(step)

        engine.run = waiting_run


def test_shutdown_may_finish_what_is_left(fake, make):
    target = fake.Engine(max_batch_size=2)
    gated, executor = Gated(target), make(target)
    requests = [Request((n, *PROMPT), 10) for n in range(5)]
    ids = executor.enqueue_requests(requests)
    ending = threading.Thread(target=executor.shutdown, kwargs={"drain": True})
    ending.start()
    while executor.can_enqueue_requests():
        pass
    with pytest.raises(ExecutorClosed):
        executor.enqueue_request(requests[0])
    gated.gate.set()
    ending.join(WAIT_S)
    for request_id, request in zip(ids, requests, strict=True):
        (response,) = executor.await_responses(request_id, 0)
        wanted = fake.plain_answer(target, request)[0]
        assert list(response.result.output_token_ids) == wanted


def test_a_second_shutdown_cuts_draining_short(fake, make):
    target = fake.Engine()
    gated, executor = Gated(target), make(target)
    request_id = executor.enqueue_request(Request(PROMPT, 60))
    ending = threading.Thread(target=executor.shutdown, kwargs={"drain": True})
    ending.start()
    while executor.can_enqueue_requests():
        pass
    hurried = threading.Thread(target=executor.shutdown)
    hurried.start()
    while executor._inbox._drains:
        pass
    gated.gate.set()
    ending.join(WAIT_S)
    hurried.join(WAIT_S)
    (response,) = executor.await_responses(request_id, 0)
    assert response.result.finish_reason is FinishReason.CANCELLED


# ---- limits ----


def test_limits_of_the_executor_hold_below_those_of_the_engine(fake, make):
    executor = make(max_batch_size=2, max_num_tokens=12)
    ids = executor.enqueue_requests([Request(tuple(range(n, n + 20)), 8) for n in range(4)])
    for request_id in ids:
        assert executor.await_responses(request_id, WAIT_S)
    steps = executor.get_latest_iteration_stats()
    assert max(s.inflight_batching_stats.num_scheduled_requests for s in steps) == 2
    assert max(s.inflight_batching_stats.num_ctx_tokens for s in steps) == 12
    assert (steps[0].max_batch_size_static, steps[0].max_batch_size_runtime) == (8, 2)
    assert (steps[0].max_num_tokens_static, steps[0].max_num_tokens_runtime) == (48, 12)


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens"])
def test_limits_beyond_the_engine_are_refused_with_both_numbers(fake, name):
    engine = fake.Engine()
    asked = getattr(engine, name) + 1
    config = ExecutorConfig(KvCacheConfig(200), **{name: asked})
    with pytest.raises(BadConfig, match=rf"{name} is {asked}; the engine was built for"):
        Executor(engine, None, config, ReferenceSampling())
    with pytest.raises(BadConfig, match=f"{name} is 0"):
        ExecutorConfig(KvCacheConfig(200), **{name: 0})


def test_the_full_queue_names_its_limit_and_what_to_do(fake, make):
    target = fake.Engine(max_batch_size=1)
    gated, executor = Gated(target), make(target, max_queue_size=2)
    executor.enqueue_requests([Request(PROMPT, 2)] * 2)
    with pytest.raises(QueueFull, match="max_queue_size 2") as refused:
        executor.enqueue_request(Request(PROMPT, 2))
    assert "try again later" in refused.value.fix
    gated.gate.set()


def test_an_end_id_of_minus_1_is_none_and_others_must_exist(make):
    assert Request(PROMPT, 2, end_id=-1).end_id is None
    with pytest.raises(BadConfig, match="end_id is -2"):
        Request(PROMPT, 2, end_id=-2)
    executor = make()
    (response,) = executor.await_responses(executor.enqueue_request(Request(PROMPT, 2, end_id=99)))
    assert "end_id holds token id 99" in str(response.error)


@pytest.mark.parametrize(
    "field", [{"priority": 2.0}, {"allotted_time_ms": 0.0}, {"max_draft_len": -1}]
)
def test_request_fields_outside_their_range_are_refused_by_name(field):
    (name,) = field
    with pytest.raises(BadConfig, match=f"{name} is"):
        Request(PROMPT, 2, **field)


# ---- figures ----


def test_a_result_tells_times_blocks_and_drafts_where_asked(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.8), 4))
    output = OutputConfig(return_perf_metrics=True)
    prompt = tuple(range(17))  # 4 blocks of 4, and the last token
    found = []
    for _ in range(2):
        request = Request(prompt, 20, output_config=output)
        (response,) = executor.await_responses(executor.enqueue_request(request), WAIT_S)
        found.append(response.result)
    first, second = (result.request_perf_metrics for result in found)
    timing = first.timing
    times = [timing.arrival_time, timing.first_scheduled_time, timing.first_token_time]
    assert [*times, timing.last_token_time] == sorted([*times, timing.last_token_time])
    assert first.first_iter == 1
    assert first.last_iter == found[0].decoding_iter
    assert second.first_iter == first.last_iter + 1
    assert first.kv_cache.num_total_allocated_blocks == 9  # 36 of 37 tokens
    assert (first.kv_cache.num_reused_blocks, first.kv_cache.num_missed_blocks) == (0, 4)
    assert (second.kv_cache.num_reused_blocks, second.kv_cache.num_missed_blocks) == (4, 0)
    assert second.kv_cache.num_new_allocated_blocks == 5
    assert second.kv_cache.kv_cache_hit_rate == 1
    drafts = first.speculative_decoding
    totals = executor.get_speculation_stats()
    assert 0 < drafts.acceptance_rate < 1
    assert 2 * drafts.total_draft_tokens == totals.draft_tokens
    assert found[0] == found[1]  # how the tokens came about is no part of what they are


def test_request_stats_count_blocks(make):
    executor = make(request_stats_max_iterations=100)
    for _ in range(2):
        executor.await_responses(executor.enqueue_request(Request(tuple(range(17)), 8)), WAIT_S)
    first, second = (
        [s for step in steps for s in step.request_stats if s.id == request_id][-1]
        for steps in [executor.get_latest_request_stats()]
        for request_id in (1, 2)
    )
    assert (first.alloc_total_blocks_per_request, first.alloc_new_blocks_per_request) == (6, 6)
    assert (first.reused_blocks_per_request, first.missed_blocks_per_request) == (0, 4)
    assert (second.reused_blocks_per_request, second.alloc_new_blocks_per_request) == (4, 2)
    assert second.alloc_total_blocks_per_request == 6
    assert (first.kv_cache_hit_rate_per_request, second.kv_cache_hit_rate_per_request) == (0, 1)


def test_blocks_of_every_returned_sequence_are_counted(make):
    sampling = SamplingConfig(temperature=1.0, top_k=0, num_return_sequences=3)
    executor = make(request_stats_max_iterations=100)
    executor.enqueue_request(Request(tuple(range(18)), 3, sampling))
    executor.shutdown(drain=True)
    (*_, last) = executor.get_latest_request_stats()
    stats = last.request_stats[0]
    # 17 tokens are looked up: 4 full blocks, which the first computes, and one token of a fifth.
    assert (stats.missed_blocks_per_request, stats.reused_blocks_per_request) == (5 + 1 + 1, 4 + 4)
    assert stats.reused_tokens_per_request == 2 * 16
    assert stats.kv_cache_hit_rate_per_request == pytest.approx(8 / 15)
    assert stats.alloc_new_blocks_per_request == 7
    assert stats.alloc_total_blocks_per_request == 7 + 8


def test_a_static_batch_counts_its_empty_slots_and_memory_is_told(make):
    policy = SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH)
    executor = make(scheduler=policy)
    ids = executor.enqueue_requests([Request((n, 2), 3 * n + 2) for n in range(3)])
    for request_id in ids:
        executor.await_responses(request_id, WAIT_S)
    steps = executor.get_latest_iteration_stats()
    batched = [s.static_batching_stats for s in steps if s.num_active_requests == 3]
    assert all(stats is not None for stats in batched)
    assert {s.static_batching_stats.empty_gen_slots for s in steps} >= {0, 1, 2}
    assert steps[0].cpu_mem_usage > 2**20
    assert steps[0].gpu_mem_usage == steps[0].pinned_mem_usage == 0
    other = make()
    other.await_responses(other.enqueue_request(Request(PROMPT, 2)), WAIT_S)
    assert other.get_latest_iteration_stats()[0].static_batching_stats is None
