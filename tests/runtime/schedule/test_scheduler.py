"""What a step takes: budgets, chunks of prompts, drafts."""

from __future__ import annotations

import pytest
from support.scheduler import (
    BLOCK,
    EQUAL_PROGRESS,
    MAX_UTILIZATION,
    STATIC_BATCH,
    finish_step,
    make_scheduler,
    make_sequence,
    shape,
    start_generation,
)

from llmctl.runtime.request import Batch, FinishReason
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy


def test_a_prompt_runs_whole_and_then_one_token_at_a_time():
    scheduler, cache = make_scheduler()
    sequence = make_sequence(10, max_tokens=3)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert shape(batch) == ((10,), ())
    assert batch.context[0].needs_logits
    finish_step(scheduler, batch)
    for _ in range(2):
        batch = scheduler.schedule()
        assert shape(batch) == ((), (0,))
        assert batch.generation[0].start == sequence.kv_len == len(sequence.tokens) - 1
        finish_step(scheduler, batch)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work and not sequence.block_table
    assert scheduler.schedule() == Batch()
    assert cache.stats().used_num_blocks == 0


def test_an_empty_scheduler_gives_an_empty_batch():
    scheduler, _ = make_scheduler()
    assert scheduler.schedule() == Batch() and not scheduler.has_work


def test_long_prompts_are_cut_at_block_borders_and_only_the_last_chunk_has_logits():
    scheduler, _ = make_scheduler(tokens=14)
    sequence = make_sequence(31)
    scheduler.add(sequence)
    sizes, logits = [], []
    while sequence.is_context:
        batch = scheduler.schedule()
        sizes.append(batch.context[0].num_tokens)
        logits.append(batch.context[0].needs_logits)
        finish_step(scheduler, batch)
    assert sizes == [12, 12, 7]
    assert logits == [False, False, True]


def test_generation_is_served_before_context_in_the_same_step():
    scheduler, _ = make_scheduler(tokens=16, draft_len=3)
    start_generation(scheduler, 5)
    scheduler.add(make_sequence(30))
    # 16 tokens: 1 root + 3 drafts leave 12 for the chunk.
    assert shape(scheduler.schedule()) == ((12,), (3,))


def test_first_come_first_served_gives_the_older_prompt_everything_it_can_use():
    scheduler, _ = make_scheduler(tokens=24)
    scheduler.add(make_sequence(18))
    scheduler.add(make_sequence(18))
    assert shape(scheduler.schedule()) == ((18, 4), ())


def test_equal_progress_gives_each_prompt_one_block_in_turn():
    scheduler, _ = make_scheduler(tokens=24, context_chunking_policy=EQUAL_PROGRESS)
    for length in (30, 30, 6):
        scheduler.add(make_sequence(length))
    # Rounds of 4: 4 4 4, then 4 4 and the last 2 of the short one: 22; no block fits in 2.
    assert shape(scheduler.schedule()) == ((8, 8, 6), ())


def test_a_sequence_that_would_get_no_token_is_not_started():
    scheduler, _ = make_scheduler(tokens=18)
    scheduler.add(make_sequence(18))
    scheduler.add(make_sequence(18))
    assert shape(scheduler.schedule()) == ((18,), ())
    assert len(scheduler.active) == len(scheduler.waiting) == 1


def test_no_more_sequences_run_than_max_batch_size():
    scheduler, _ = make_scheduler(batch=2)
    for _ in range(3):
        scheduler.add(make_sequence(4))
    assert shape(scheduler.schedule()) == ((4, 4), ())


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("policy", [CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, STATIC_BATCH])
def test_roots_fit_max_num_tokens_even_where_max_batch_size_is_larger(policy, is_chunked):
    """Also where a whole prompt has a step for itself, and generation waits for it."""
    options = {"capacity_scheduler_policy": policy, "enable_chunked_context": is_chunked}
    scheduler, _ = make_scheduler(batch=16, tokens=5, **options)
    for index in range(16):
        scheduler.add(make_sequence(1 + index % 4))
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert sum(part.num_tokens for part in batch.slices) <= 5
        finish_step(scheduler, batch)


def test_drafts_shrink_fairly_where_the_token_budget_is_short():
    scheduler, _ = make_scheduler(tokens=11, draft_len=4)
    start_generation(scheduler, 3, 3, 3)
    assert shape(scheduler.schedule()) == ((), (3, 3, 2))  # 11 tokens - 3 roots


def test_drafts_yield_to_a_starving_prompt_but_only_by_one_block():
    scheduler, _ = make_scheduler(tokens=12, draft_len=5)
    start_generation(scheduler, 3, 3)
    assert shape(scheduler.schedule()) == ((), (5, 5))
    scheduler.add(make_sequence(20))
    assert shape(scheduler.schedule()) == ((4,), (3, 3))


def test_drafts_end_with_the_last_token_that_may_still_be_emitted():
    scheduler, _ = make_scheduler(draft_len=6)
    (sequence,) = start_generation(scheduler, 5, max_tokens=6)  # one of six is out
    expected = {1: 4, 2: 3, 3: 2, 4: 1, 5: 0}
    while scheduler.has_work:
        num_new_tokens = sequence.num_new_tokens
        batch = scheduler.schedule()
        assert batch.generation[0].draft_len == expected[num_new_tokens]
        finish_step(scheduler, batch)
    assert sequence.num_new_tokens == 6


def test_blocks_are_reserved_for_the_whole_round():
    scheduler, _ = make_scheduler(draft_len=6, capacity_scheduler_policy=MAX_UTILIZATION)
    (sequence,) = start_generation(scheduler, 5)
    batch = scheduler.schedule()
    part = batch.generation[0]
    assert len(sequence.block_table) * BLOCK >= part.start + part.num_tokens + part.draft_len
