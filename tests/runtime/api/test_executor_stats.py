"""Step-time targets and statistics of an executor, and its endings under random traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor import PROMPT, WAIT_S, answer, config

from llmctl.errors import (
    BadConfig,
)
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime import loop
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig
from llmctl.runtime.stats.counters import RequestStage


def test_a_step_time_target_shrinks_prompt_chunks_and_changes_no_token(fake, make, monkeypatch):
    now_s = 0.0

    class TimedEngine(fake.Engine):
        def run(self, step):
            nonlocal now_s
            now_s += 0.0009 * len(step.token_ids)
            return super().run(step)

    monkeypatch.setattr(loop, "perf_counter", lambda: now_s)
    request = Request(tuple(i % 20 for i in range(200)), 4)
    free, limited = (TimedEngine(max_seq_len=256) for _ in range(2))
    unhurried = answer(make(free), request)
    hurried = answer(make(limited, max_step_ms=8.0), request)
    assert hurried.result.output_token_ids == unhurried.result.output_token_ids
    assert free.num_tokens[:4] == [48, 48, 48, 48]
    assert limited.num_tokens[:3] == [4, 8, 8]  # 7.2 ms; one block more would take 10.8
    assert set(limited.num_tokens[1:-4]) == {8}


def test_the_knee_of_step_times_is_found_while_prompts_are_computed(fake, make, monkeypatch):
    now_s = 0.0

    class TimedEngine(fake.Engine):
        def run(self, step):
            nonlocal now_s
            now_s += 0.001 * len(step.token_ids)  # nothing is gained by long steps
            return super().run(step)

    monkeypatch.setattr(loop, "perf_counter", lambda: now_s)
    target = TimedEngine(max_seq_len=1024)
    request = Request(tuple(i % 20 for i in range(700)), 4)
    answer(make(target, max_step_ms="auto"), request)
    assert target.num_tokens[0] == 48 and target.num_tokens[40] == 4


def test_a_step_time_target_needs_chunked_context_and_bounds():
    scheduler = SchedulerConfig(enable_chunked_context=False)
    with pytest.raises(BadConfig, match="chunked-context has none"):
        config(scheduler=scheduler, max_step_ms=5.0)
    for value in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(BadConfig, match="max-step-ms is .* more than 0 ms and less than 1e"):
            config(max_step_ms=value)
    with pytest.raises(BadConfig, match="max_step_ms is 'knee' .* a number, or 'auto', or None"):
        config(max_step_ms="knee")


def test_iteration_stats_are_bounded_and_drained(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(), 3), iter_stats_max_iterations=4)
    answer(executor, Request(tuple(range(20)), 30))
    executor.shutdown()
    stats = executor.get_latest_iteration_stats()
    assert [item.iter for item in stats] == list(range(stats[-1].iter - 3, stats[-1].iter + 1))
    assert executor.get_latest_iteration_stats() == []
    last = stats[-1]
    assert (last.num_completed_requests, last.num_queued_requests) == (1, 0)
    assert last.inflight_batching_stats.num_gen_requests == 1
    full = stats[0].spec_decoding_stats
    assert (full.num_draft_tokens, full.num_accepted_tokens) == (3, 3)
    assert full.acceptance_length == 4.0 and 0 < full.draft_overhead < 1
    assert last.kv_cache_stats.max_num_blocks == 200


def test_the_rounds_of_the_iterations_add_up_to_the_totals(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.6), 3))
    tokens = answer(executor, Request(PROMPT, 40)).result.output_token_ids
    executor.shutdown()
    total, steps = executor.get_speculation_stats(), executor.get_latest_iteration_stats()
    rounds = [item for step in steps for item in step.rounds]
    assert len(rounds) == total.rounds
    assert sum(item.num_draft_tokens for item in rounds) == total.draft_tokens
    assert sum(item.num_accepted_tokens for item in rounds) == total.accepted_tokens
    assert 1 + sum(item.num_tokens for item in rounds) == len(tokens)  # 1: out of the prompt
    of_rounds = [step for step in steps if step.rounds]
    assert len(of_rounds) == len(steps) - 1, "the first step reads the prompt"
    assert sum(step.draft_latency_ms for step in of_rounds) == pytest.approx(1e3 * total.draft_s)
    assert sum(step.verify_latency_ms for step in of_rounds) == pytest.approx(1e3 * total.verify_s)


def test_the_first_iteration_shows_the_context_and_the_start(make):
    executor = make()
    answer(executor, Request(tuple(range(20)), 3))
    executor.shutdown()
    first, second, _ = executor.get_latest_iteration_stats()
    assert first.num_new_active_requests == 1 and second.num_new_active_requests == 0
    assert first.inflight_batching_stats.num_ctx_tokens == 20
    assert first.new_active_requests_queue_latency_ms >= 0
    assert second.spec_decoding_stats is None
    assert second.inflight_batching_stats.avg_num_decoded_tokens_per_iter == 1.0


def test_request_stats_follow_a_request_to_its_end(fake, make):
    target = fake.Engine(max_num_tokens=8)
    executor = make(target, request_stats_max_iterations=100)
    answer(executor, Request(tuple(range(16)), 3))
    answer(executor, Request((*range(16), 5), 3))
    executor.shutdown()
    history = [item.request_stats[0] for item in executor.get_latest_request_stats()]
    assert [item.stage for item in history[:4]] == [
        RequestStage.CONTEXT_IN_PROGRESS,
        RequestStage.GENERATION_IN_PROGRESS,
        RequestStage.GENERATION_IN_PROGRESS,
        RequestStage.GENERATION_COMPLETE,
    ]
    assert [item.context_prefill_position for item in history[:2]] == [8, 16]
    assert [item.num_generated_tokens for item in history[:4]] == [0, 1, 2, 3]
    assert history[-1].reused_tokens_per_request == 16
    assert history[-1].kv_cache_hit_rate_per_request == 1  # 4 blocks of 4, and the last token
    assert executor.get_latest_request_stats() == []


def test_speculation_totals_add_up(fake, make):
    executor = make(drafter=DraftEngineDrafter(fake.Engine(agreement=0.6), 3))
    for number in range(10):
        answer(executor, Request((number, *PROMPT), 40))
    executor.shutdown()
    stats = executor.get_speculation_stats()
    assert sum(stats.histogram) == stats.rounds
    assert sum(a * count for a, count in enumerate(stats.histogram)) == stats.accepted_tokens
    assert sum(stats.accepted_at_position) == stats.accepted_tokens
    assert stats.accepted_at_position == sorted(stats.accepted_at_position, reverse=True)
    assert stats.acceptance_length == pytest.approx(10 * 39 / stats.rounds)
    assert min(stats.draft_s, stats.verify_s, stats.host_s) > 0


actions = st.lists(
    st.tuples(
        st.sampled_from(["request", "request", "request", "cancel", "wait"]),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40)
@given(actions, st.sampled_from(["none", "ngram", "draft"]), st.booleans(), st.booleans())
def test_every_request_ends_in_exactly_one_state_and_no_block_leaks(
    fake, steps, name, pauses, is_patient
):
    drafter = {
        "none": lambda: None,
        "ngram": lambda: NgramDrafter(3),
        "draft": lambda: DraftEngineDrafter(fake.Engine(agreement=0.7), 3),
    }[name]()
    policies = CapacitySchedulerPolicy
    policy = policies.MAX_UTILIZATION if pauses else policies.GUARANTEED_NO_EVICT
    settings_ = config(26, scheduler=SchedulerConfig(policy), request_stats_max_iterations=5)
    ids: list[int] = []
    finals: dict[int, int] = {}

    def note(responses) -> None:
        for response in responses:
            if response.has_error or response.result.is_final:
                finals[response.request_id] = finals.get(response.request_id, 0) + 1

    with Executor(
        fake.Engine(max_batch_size=3), drafter, settings_, ReferenceSampling()
    ) as executor:
        for kind, number in steps:
            generator = np.random.default_rng(number)
            if kind == "request":
                request = Request(
                    tuple(generator.integers(0, 24, generator.integers(1, 100)).tolist()),
                    int(generator.integers(1, 60)),
                    SamplingConfig(num_return_sequences=int(generator.integers(1, 4))),
                    streaming=bool(generator.integers(2)),
                    allotted_time_ms=float(generator.choice([0.5, 1e6])),
                )
                ids.append(executor.enqueue_request(request))
            elif kind == "cancel" and ids:
                executor.cancel_request(ids[number % len(ids)])
            elif kind == "wait":
                note(executor.await_responses(timeout_s=0.002))
        while is_patient and len(finals) < len(ids):  # otherwise shutdown cancels the rest
            note(executor.await_responses(timeout_s=WAIT_S))
    note(executor.await_responses())
    assert finals == dict.fromkeys(ids, 1)
    assert executor.await_responses() == []
    assert executor._worker.kv_cache.stats().used_num_blocks == 0
    executor._worker.kv_cache.check_invariants()
