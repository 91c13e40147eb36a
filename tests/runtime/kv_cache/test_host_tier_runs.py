"""Whole runs with a host tier: no output changes, others run meanwhile, failed copies."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest

from llmctl.errors import BadConfig, DeviceFailure
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor, ExecutorConfig
from llmctl.runtime.api.executor_config import KvCacheConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.request import Request, SamplingConfig


def requests(count):
    """Prompts that return to one of a few stems again and again."""
    generator = np.random.default_rng(5)
    stems = [generator.integers(0, 23, 24).tolist() for _ in range(6)]
    made = []
    for index in range(count):
        tail = generator.integers(0, 23, generator.integers(1, 12)).tolist()
        prompt = stems[generator.integers(6)][: generator.integers(6, 25)] + tail
        params = SamplingConfig(temperature=0.8, top_k=0, seed=index)
        made.append(Request(tuple(prompt), int(generator.integers(1, 20)), params))
    return made


@pytest.mark.parametrize("steps_to_land", [None, 2, 100])
@pytest.mark.parametrize("agreement", [None, 0.8])
@pytest.mark.parametrize("on_device", [False, True])
def test_output_with_a_host_tier_is_the_plain_answer(fake, agreement, on_device, steps_to_land):
    draft, drafter = None, None
    if agreement is not None:
        draft = fake.Engine(agreement=agreement, steps_to_land=steps_to_land and steps_to_land + 1)
        drafter = DraftEngineDrafter(draft, 4)
    target = fake.Engine(steps_to_land=steps_to_land)
    harness = fake.Harness(
        target, drafter, draft=draft, num_blocks=40, num_host_blocks=30, on_device=on_device
    )
    wanted = requests(80)
    for first in range(0, 80, 5):
        group = wanted[first : first + 5]
        sequences = [harness.add(request) for request in group]
        harness.run()
        for request, sequence in zip(group, sequences, strict=True):
            found = sequence.tokens[sequence.num_prompt_tokens :]
            assert found == fake.plain_answer(harness.target, request)[0]
    stats = harness.kv_cache.stats()
    assert stats.offloaded_blocks > 50 and stats.onboarded_blocks > 20


def with_forgotten(fake, on_device=False, steps_to_land=6):
    """A harness whose host memory holds a prompt of 25 tokens, and that prompt."""
    harness = fake.Harness(
        fake.Engine(steps_to_land=steps_to_land),
        num_blocks=24,
        num_host_blocks=30,
        on_device=on_device,
    )
    prompt = tuple(range(20)) + (3, 1, 4, 1, 5)
    for tokens in (prompt, (7,) * 93):
        harness.add(Request(tokens, 3))
        harness.run()
    assert harness.kv_cache.stats().host_used_num_blocks >= 6
    return harness, prompt


@pytest.mark.parametrize("on_device", [False, True])
def test_others_run_while_blocks_come_back(fake, on_device):
    harness, prompt = with_forgotten(fake, on_device)
    other = harness.add(Request((2, 2, 2), 40))
    while other.is_context:
        harness.step()
    back = harness.add(Request(prompt, 5))
    lengths = []
    while back.num_new_tokens == 0:
        lengths.append(len(other.tokens))
        harness.step()
    assert back.blocks.num_reused_tokens == 24
    assert 6 <= len(lengths) <= 9, "it runs as soon as its blocks are there"
    assert all(later > earlier for earlier, later in zip(lengths, lengths[1:], strict=False))
    harness.run()
    for sequence in (other, back):
        wanted = fake.plain_answer(harness.target, sequence.request)[0]
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted


def test_who_runs_alone_waits_on_the_device_and_loses_no_step(fake):
    harness, prompt = with_forgotten(fake, steps_to_land=10**6)
    back = harness.add(Request(prompt, 5))
    report = harness.step()
    assert [item.sequence for item in report.batch.slices] == [back]
    assert back.num_new_tokens == 1
    harness.run()
    assert back.tokens[25:] == fake.plain_answer(harness.target, back.request)[0]


def test_a_second_request_for_what_is_on_its_way_waits_for_the_same_copy(fake):
    harness, prompt = with_forgotten(fake)
    other = harness.add(Request((2, 2, 2), 40))
    harness.step()
    first = harness.add(Request(prompt, 5))
    harness.step()
    second = harness.add(Request((*prompt, 8), 5))
    onboarded = harness.kv_cache.stats().onboarded_blocks
    harness.run()
    assert harness.kv_cache.stats().onboarded_blocks == onboarded
    for sequence in (other, first, second):
        wanted = fake.plain_answer(harness.target, sequence.request)[0]
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted


def test_a_block_given_up_while_it_is_filled_is_not_written_before_that_is_over(fake):
    harness, prompt = with_forgotten(fake)
    other = harness.add(Request((2, 2, 2), 60))
    harness.step()
    back = harness.add(Request((*prompt[:22], 9, 9), 5))
    harness.step()
    given_up = back.block_table[5]
    assert given_up in harness.kv_cache.arrivals and back.blocks.num_reused_tokens == 22
    harness.cancel(back)
    while given_up not in other.block_table:
        assert given_up in harness.kv_cache.arrivals
        harness.step()
    assert not harness.kv_cache.arrivals
    harness.run()
    wanted = fake.plain_answer(harness.target, other.request)[0]
    assert other.tokens[other.num_prompt_tokens :] == wanted


def test_a_block_evicted_while_it_is_filled_is_found_whole(fake):
    harness, prompt = with_forgotten(fake, steps_to_land=10**6)
    other = harness.add(Request((2, 2, 2), 60))
    harness.step()
    back = harness.add(Request(prompt, 5))
    harness.step()
    assert len(harness.kv_cache.arrivals) == 6
    harness.cancel(back)
    big = harness.add(Request((9, 8) * 40, 10))  # takes every block there is
    harness.run()
    assert not harness.kv_cache.arrivals
    again = harness.add(Request(prompt, 5))
    harness.run()
    assert again.blocks.num_reused_tokens == 24
    for sequence in (other, big, again):
        wanted = fake.plain_answer(harness.target, sequence.request)[0]
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted


def test_a_host_tier_answers_what_the_device_has_forgotten(fake):
    hits = {}
    for num_host_blocks in (0, 60):
        harness = fake.Harness(fake.Engine(), num_blocks=14, num_host_blocks=num_host_blocks)
        for request in requests(60):
            harness.add(request)
            harness.run()
        hits[num_host_blocks] = harness.kv_cache.stats().token_hit_rate
    assert hits[60] > 2 * hits[0]


def test_a_copy_that_fails_fails_its_requests_and_leaves_the_executor_right(fake):
    target = fake.Engine()
    config = ExecutorConfig(KvCacheConfig(14, num_host_blocks=30), check_invariants=True)
    with Executor(target, None, config, ReferenceSampling()) as executor:
        num_failed = 0
        for index, request in enumerate(requests(60)):
            target.fail_copies = index % 3 == 0
            (response,) = executor.await_responses(executor.enqueue_request(request), 30.0)
            num_failed += response.has_error
            if response.result is not None:
                wanted = fake.plain_answer(target, request)[0]
                assert list(response.result.output_token_ids) == wanted
        assert 0 < num_failed <= 20
    executor._worker.kv_cache.check_invariants()


def test_a_copy_that_fails_for_a_round_to_come_leaves_nothing_cached(fake):
    target, has_failed = fake.Engine(), []
    config = ExecutorConfig(KvCacheConfig(20, num_host_blocks=30), check_invariants=True)
    copy_blocks = target.copy_blocks

    def broken(copies):
        loop = executor._worker._loop
        if loop.touched is not None and not has_failed:  # while a round of these is started
            has_failed.append(copies)
            raise DeviceFailure("the copy broke")
        return copy_blocks(copies)

    target.copy_blocks = broken
    runner = fake.Runner(target, None, 0)
    with Executor(target, None, config, ReferenceSampling(), runner) as executor:
        for request in requests(60):
            (response,) = executor.await_responses(executor.enqueue_request(request), 30.0)
            assert response.has_error == (len(has_failed) == 1)
            if response.has_error:
                has_failed.append("told")
                deadline = monotonic() + 30  # the answer comes first
                while executor._worker.kv_cache._store.tree.nodes():
                    assert monotonic() < deadline, "what is in the cache may be another's"
            else:
                wanted = fake.plain_answer(target, request)[0]
                assert list(response.result.output_token_ids) == wanted
    assert len(has_failed) == 2


def test_a_copy_that_fails_on_its_way_fails_its_requests_and_leaves_the_executor_right(fake):
    target = fake.Engine(steps_to_land=2)
    config = ExecutorConfig(KvCacheConfig(14, num_host_blocks=30), check_invariants=True)

    class Broken:
        def is_done(self):
            raise DeviceFailure("the link broke", fix="start again")

        hold = is_done

    copy_blocks, num_broken = target.copy_blocks, 0

    def broken(copies):
        nonlocal num_broken
        arrival = copy_blocks(copies)
        if arrival is None or num_broken == 3:
            return arrival
        num_broken += 1
        target.under_way.remove(arrival)
        return Broken()

    target.copy_blocks = broken
    with Executor(target, None, config, ReferenceSampling()) as executor:
        num_failed = 0
        for first in range(0, 60, 3):
            group = requests(60)[first : first + 3]
            ids = executor.enqueue_requests(group)
            for request, (response,) in zip(
                group, executor.await_responses(ids, 30.0), strict=True
            ):
                num_failed += response.has_error
                if response.result is not None:
                    wanted = fake.plain_answer(target, request)[0]
                    assert list(response.result.output_token_ids) == wanted
        assert num_broken == 3 and 0 < num_failed <= 9
    executor._worker.kv_cache.check_invariants()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"event_buffer_max_size": -1}, "event_buffer_max_size is -1"),
        ({"secondary_offload_min_priority": 101}, "secondary_offload_min_priority is 101"),
        ({"num_host_blocks": 1, "enable_block_reuse": False}, "enable_block_reuse is off"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options, words):
    with pytest.raises(BadConfig, match=words):
        KvCacheConfig(4, **options)
