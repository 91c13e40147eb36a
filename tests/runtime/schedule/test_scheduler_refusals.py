"""What the scheduler refuses; cancellations; token budgets."""

from __future__ import annotations

import pytest
from support.scheduler import (
    MAX_UTILIZATION,
    STATIC_BATCH,
    finish_step,
    make_scheduler,
    make_sequence,
    shape,
    start_generation,
)

from llmctl.errors import BadConfig, OutOfMemory, PromptTooLong
from llmctl.runtime.request import FinishReason
from llmctl.runtime.schedule.scheduler import (
    CapacitySchedulerPolicy,
    Limits,
)


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    scheduler, _ = make_scheduler(tokens=16, enable_chunked_context=False)
    scheduler.add(make_sequence(10))
    scheduler.add(make_sequence(10))
    batch = scheduler.schedule()
    assert shape(batch) == ((10,), ())
    finish_step(scheduler, batch)
    assert shape(scheduler.schedule()) == ((10,), (0,))


def test_a_prompt_that_fills_max_seq_len_is_refused():
    scheduler, _ = make_scheduler(seq_len=20)
    with pytest.raises(PromptTooLong, match="20 tokens; max_seq_len 20"):
        scheduler.add(make_sequence(20))


def test_without_chunking_a_prompt_beyond_max_num_tokens_is_refused_by_name_of_the_flag():
    scheduler, _ = make_scheduler(tokens=16, enable_chunked_context=False)
    with pytest.raises(PromptTooLong, match="17 tokens.*16.*enable_chunked_context") as caught:
        scheduler.add(make_sequence(17))
    assert "--enable_chunked_context" in caught.value.fix
    assert not scheduler.has_work


def test_without_chunking_what_could_not_resume_after_a_pause_is_refused():
    scheduler, _ = make_scheduler(
        tokens=16, enable_chunked_context=False, capacity_scheduler_policy=MAX_UTILIZATION
    )
    scheduler.add(make_sequence(9, max_tokens=8))  # 16 tokens of context at most
    with pytest.raises(PromptTooLong, match="context of 17 tokens"):
        scheduler.add(make_sequence(9, max_tokens=9))


@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
def test_a_sequence_larger_than_the_cache_is_refused_with_the_numbers(policy):
    scheduler, _ = make_scheduler(num_blocks=5, capacity_scheduler_policy=policy)
    scheduler.add(make_sequence(12, max_tokens=9))  # 20 tokens enter the cache: 5 blocks
    with pytest.raises(OutOfMemory, match="22 tokens needs 6 KV blocks; the cache has 5") as caught:
        scheduler.add(make_sequence(12, max_tokens=10))
    assert "--kv_cache_free_gpu_memory_fraction" in caught.value.fix


def test_max_num_tokens_below_one_block_is_refused_when_prompts_are_chunked():
    with pytest.raises(BadConfig, match="max_num_tokens is 3"):
        make_scheduler(tokens=3)
    make_scheduler(tokens=3, enable_chunked_context=False)


def test_steps_smaller_than_a_group_with_fp8_products_are_refused_with_the_option():
    with pytest.raises(BadConfig, match=r"max_num_tokens is 15; .* FP8 .* 16 tokens at") as caught:
        make_scheduler(tokens=15, group=16)
    assert "--use_fp8_context_fmha disable" in caught.value.fix
    make_scheduler(tokens=15, group=16, enable_chunked_context=False)
    scheduler, _ = make_scheduler(tokens=64, group=16)
    with pytest.raises(BadConfig, match=r"budget is 15; it must be from 16 \(a group .* to 64"):
        scheduler.set_token_budget(15)


def test_a_group_is_read_beside_generation_if_the_budget_is_smaller():
    scheduler, _ = make_scheduler(tokens=64, group=16)
    start_generation(scheduler, 3, 3)
    scheduler.set_token_budget(16)
    sequence = make_sequence(60)
    sequence.context_end = 48
    scheduler.add(sequence)
    assert shape(scheduler.schedule()) == ((16,), (0, 0))


@pytest.mark.parametrize("field", ["max_batch_size", "max_num_tokens", "max_seq_len"])
def test_limits_below_one_are_refused(field):
    values = {"max_batch_size": 1, "max_num_tokens": 1, "max_seq_len": 1, field: 0}
    with pytest.raises(BadConfig, match=field):
        Limits(**values)
    with pytest.raises(BadConfig, match="max_draft_len"):
        Limits(1, 1, 1, -1)


def test_cancelling_frees_waiting_and_active_sequences_and_is_idempotent():
    scheduler, cache = make_scheduler(batch=1)
    active, waiting = make_sequence(8), make_sequence(8)
    scheduler.add(active)
    scheduler.add(waiting)
    finish_step(scheduler, scheduler.schedule())
    for _ in range(2):
        scheduler.cancel(waiting)
        scheduler.cancel(active)
    assert not scheduler.has_work and cache.stats().used_num_blocks == 0


def test_a_sequence_cancelled_while_its_step_runs_is_skipped_by_update():
    scheduler, cache = make_scheduler()
    sequence = make_sequence(8)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    scheduler.cancel(sequence)
    finish_step(scheduler, batch)
    cache.check_invariants()
    assert not scheduler.has_work and cache.stats().used_num_blocks == 0


def test_cancelling_the_head_that_did_not_fit_lets_the_next_one_start():
    scheduler, _ = make_scheduler(num_blocks=6)
    scheduler.add(make_sequence(4, max_tokens=13))  # 4 blocks
    big, small = make_sequence(4, max_tokens=9), make_sequence(2, max_tokens=3)
    scheduler.add(big)  # 3 blocks
    scheduler.add(small)
    for _ in range(2):  # the second step publishes nothing: only the cancel changes the outlook
        finish_step(scheduler, scheduler.schedule())
    assert len(scheduler.active) == 1
    scheduler.cancel(big)
    scheduler.schedule()
    assert small in scheduler.active


def test_a_sequence_that_ends_outside_the_batch_is_released_too():
    scheduler, cache = make_scheduler(tokens=8, capacity_scheduler_policy=STATIC_BATCH)
    first, second = make_sequence(8), make_sequence(8)
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert [part.sequence for part in batch.slices] == [first]
    second.finish_reason = FinishReason.TIMED_OUT
    finish_step(scheduler, batch)
    assert scheduler.active == (first,)
    cache.check_invariants()


def test_the_token_budget_cuts_context_and_leaves_generation_alone():
    scheduler, _ = make_scheduler(tokens=64, draft_len=5)
    start_generation(scheduler, 3, 3)
    scheduler.add(make_sequence(60))
    scheduler.set_token_budget(20)
    assert shape(scheduler.schedule()) == ((8,), (5, 5))
    scheduler.set_token_budget(4)
    assert shape(scheduler.schedule()) == ((4,), (5, 5))


@pytest.mark.parametrize("num_tokens", [3, 65])
def test_a_token_budget_outside_one_block_to_max_num_tokens_is_refused(num_tokens):
    scheduler, _ = make_scheduler(tokens=64)
    with pytest.raises(BadConfig, match=f"budget is {num_tokens}; it must be from 4 .* to 64"):
        scheduler.set_token_budget(num_tokens)


def test_a_token_budget_without_chunking_is_refused():
    scheduler, _ = make_scheduler(enable_chunked_context=False)
    with pytest.raises(BadConfig, match="chunked context"):
        scheduler.set_token_budget(16)


def test_a_chunk_after_a_partial_block_hit_completes_that_block_first():
    scheduler, _ = make_scheduler(tokens=8)
    scheduler.add(make_sequence(16, max_tokens=1, first_token=1))
    while scheduler.has_work:
        finish_step(scheduler, scheduler.schedule())
    other = make_sequence(20, first_token=1)
    other.tokens[6:] = range(500, 514)
    scheduler.add(other)
    batch = scheduler.schedule()
    assert (batch.context[0].start, batch.context[0].num_tokens) == (6, 6)  # 6..12, a border
