"""The scheduler's rules, one at a time: budgets, drafts, chunks, admission, pausing, refusal."""

from __future__ import annotations

import itertools

import pytest

from llmctl.errors import BadConfig, OutOfMemory, PromptTooLong
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Batch, FinishReason, Request, Sequence
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import (
    CapacitySchedulerPolicy,
    Limits,
    Scheduler,
    SchedulerConfig,
)

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS
BLOCK = 4  # tokens_per_block of every cache here

_ids = itertools.count(1)


def make_sequence(num_prompt_tokens, max_tokens=8, first_token=None):
    """A fresh sequence; unless first_token is given its prompt shares no prefix with others."""
    sequence_id = next(_ids)
    first = 1000 * sequence_id if first_token is None else first_token
    tokens = list(range(first, first + num_prompt_tokens))
    return Sequence(
        sequence_id=sequence_id,
        request_id=sequence_id,
        request=Request(tuple(tokens), max_tokens=max_tokens),
        index=0,
        tokens=tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_len=num_prompt_tokens + max_tokens,
    )


def make_scheduler(
    num_blocks=64, batch=8, tokens=64, draft_len=0, seq_len=200, has_draft=False, **config
):
    cache = KvCacheManager(num_blocks, BLOCK, groups=("target", "draft")[: 1 + has_draft])
    limits = Limits(batch, tokens, seq_len, draft_len)
    return Scheduler(SchedulerConfig(**config), cache, limits), cache


def finish_step(scheduler, batch, accepted=0):
    """Commit one emitted token and `accepted` drafts for every slice that has logits."""
    for part in batch.slices:
        sequence, draft_len = part.sequence, part.draft_len
        sequence.kv_len = part.start + part.num_tokens
        if part.needs_logits:
            taken = min(accepted, draft_len)
            sequence.tokens += [7] * (taken + 1)
            sequence.kv_len += taken
            if len(sequence.tokens) >= sequence.max_len:
                sequence.finish_reason = FinishReason.LENGTH
        sequence.kv_lens = [sequence.kv_len] * len(sequence.kv_lens)
    scheduler.update(batch)


def shape(batch: Batch):
    """((context chunk sizes), (draft lengths)) of a batch."""
    return (
        tuple(part.num_tokens for part in batch.context),
        tuple(part.draft_len for part in batch.generation),
    )


def start_generation(scheduler, *prompt_lens, max_tokens=40):
    """Add prompts and step until all of them are in generation."""
    sequences = [make_sequence(length, max_tokens) for length in prompt_lens]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or any(sequence.is_context for sequence in scheduler.active):
        finish_step(scheduler, scheduler.schedule())
    return sequences


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


def test_roots_fit_max_num_tokens_even_where_max_batch_size_is_larger():
    scheduler, _ = make_scheduler(batch=8, tokens=5)
    for _ in range(8):
        scheduler.add(make_sequence(1))
    for _ in range(4):
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


def test_no_evict_starts_only_what_fits_to_its_full_length():
    scheduler, _ = make_scheduler(num_blocks=10)
    first, second = make_sequence(4, max_tokens=16), make_sequence(4, max_tokens=20)
    scheduler.add(first)  # 19 tokens enter the cache: 5 blocks
    scheduler.add(second)  # 23: 6 blocks
    scheduler.add(make_sequence(1, max_tokens=1))  # would fit, but nobody overtakes
    while first.finish_reason is FinishReason.NOT_FINISHED:
        batch = scheduler.schedule()
        assert scheduler.active == (first,)
        finish_step(scheduler, batch)
    scheduler.schedule()
    assert scheduler.active[0] is second and len(scheduler.active) == 2


def test_no_evict_does_not_charge_twice_for_blocks_that_a_running_sequence_shares():
    scheduler, _ = make_scheduler(num_blocks=6)
    first = make_sequence(16, max_tokens=5, first_token=1)  # 20 tokens: 5 blocks
    second = make_sequence(17, max_tokens=4, first_token=1)  # 5 blocks, 4 of them shared
    scheduler.add(first)
    finish_step(scheduler, scheduler.schedule())
    scheduler.add(second)
    batch = scheduler.schedule()
    assert shape(batch) == ((1,), (0,))
    assert second.block_table[:4] == first.block_table[:4]


def test_max_utilization_pauses_the_latest_started_and_it_finishes_later():
    scheduler, cache = make_scheduler(num_blocks=6, capacity_scheduler_policy=MAX_UTILIZATION)
    first, second = make_sequence(8, max_tokens=14), make_sequence(8, max_tokens=14)
    scheduler.add(first)
    scheduler.add(second)
    finish_step(scheduler, scheduler.schedule())
    assert scheduler.active == (first, second)
    while not scheduler.waiting:
        finish_step(scheduler, scheduler.schedule())
    assert scheduler.waiting == (second,) and scheduler.num_paused == 1
    assert not any(second.kv_lens) and not second.block_table
    assert second.num_new_tokens > 0, "the tokens of a paused sequence are kept"
    while scheduler.has_work:
        finish_step(scheduler, scheduler.schedule())
        cache.check_invariants()
    assert first.num_new_tokens == second.num_new_tokens == 14


def test_drafts_shrink_before_anybody_is_paused():
    scheduler, _ = make_scheduler(
        num_blocks=8, draft_len=7, capacity_scheduler_policy=MAX_UTILIZATION
    )
    sequences = start_generation(scheduler, 8, 8, max_tokens=20)
    draft_lens = {}
    while len(sequences[0].tokens) <= 16:
        batch = scheduler.schedule()
        draft_lens[len(sequences[0].tokens)] = shape(batch)[1]
        finish_step(scheduler, batch)
    # Each has half of the 8 blocks, 16 tokens: from 10 tokens on, 7 drafts no longer fit.
    assert draft_lens == {length: (min(7, 16 - length),) * 2 for length in range(9, 17)}
    assert scheduler.num_paused == 0


def test_a_paused_sequence_is_first_in_the_queue():
    scheduler, _ = make_scheduler(num_blocks=6, capacity_scheduler_policy=MAX_UTILIZATION)
    paused = start_generation(scheduler, 8, 8, max_tokens=14)[1]
    later = make_sequence(16)
    scheduler.add(later)
    while not scheduler.num_paused:
        finish_step(scheduler, scheduler.schedule())
    assert scheduler.waiting == (paused, later)


def test_a_resumed_sequence_whose_blocks_are_cached_goes_on_without_recomputing():
    scheduler, _ = make_scheduler(num_blocks=8, capacity_scheduler_policy=MAX_UTILIZATION)
    (sequence,) = start_generation(scheduler, 8, max_tokens=14)
    scheduler._pause(sequence)
    batch = scheduler.schedule()
    assert shape(batch) == ((), (0,))
    assert batch.generation[0].start == len(sequence.tokens) - 1 == 8


def test_the_round_of_a_resumed_sequence_counts_against_the_context_budget():
    scheduler, _ = make_scheduler(
        num_blocks=32, tokens=10, draft_len=3, capacity_scheduler_policy=MAX_UTILIZATION
    )
    (sequence,) = start_generation(scheduler, 8, max_tokens=14)
    scheduler._pause(sequence)
    scheduler.add(make_sequence(20))
    assert shape(scheduler.schedule()) == ((4,), (3,))  # 10 tokens - 4 of the round, whole blocks


def test_an_older_prompt_pauses_a_younger_sequence_in_generation():
    scheduler, _ = make_scheduler(
        num_blocks=6,
        tokens=8,
        context_chunking_policy=EQUAL_PROGRESS,
        capacity_scheduler_policy=MAX_UTILIZATION,
    )
    older, younger = make_sequence(20, max_tokens=2), make_sequence(4, max_tokens=20)
    scheduler.add(older)
    scheduler.add(younger)
    while not scheduler.num_paused:
        batch = scheduler.schedule()
        assert batch.context[0].sequence is older, "the oldest makes progress in every step"
        finish_step(scheduler, batch)
    assert scheduler.waiting == (younger,)


def test_max_utilization_starts_nobody_in_the_room_of_running_drafts():
    scheduler, _ = make_scheduler(
        num_blocks=6, draft_len=7, capacity_scheduler_policy=MAX_UTILIZATION
    )
    start_generation(scheduler, 5, max_tokens=12)  # next round: 6 + 7 tokens, 4 blocks
    later = make_sequence(2, max_tokens=8)  # its first round: 9 tokens, 3 blocks
    scheduler.add(later)
    scheduler.schedule()
    assert scheduler.waiting == (later,)


def test_equal_prompts_that_arrive_together_are_computed_once():
    scheduler, cache = make_scheduler()
    twins = [make_sequence(11, first_token=1) for _ in range(3)]
    for twin in twins:
        scheduler.add(twin)
    batch = scheduler.schedule()
    assert [part.sequence for part in batch.slices] == twins[:1]
    finish_step(scheduler, batch)
    assert shape(scheduler.schedule()) == ((3, 3), (0,))
    assert cache.stats().reused_blocks == 4


def test_nobody_waits_for_a_prefix_where_reuse_is_off():
    cache = KvCacheManager(64, BLOCK, enable_block_reuse=False)
    scheduler = Scheduler(SchedulerConfig(), cache, Limits(8, 64, 200))
    for _ in range(2):
        scheduler.add(make_sequence(11, first_token=1))
    assert shape(scheduler.schedule()) == ((11, 11), ())


def test_a_head_that_does_not_fit_is_looked_up_again_only_after_a_change(monkeypatch):
    scheduler, cache = make_scheduler(num_blocks=6)
    start_generation(scheduler, 5, max_tokens=15)
    scheduler.add(make_sequence(9, max_tokens=4))
    lookups = []
    lookup = cache.lookup
    monkeypatch.setattr(cache, "lookup", lambda head: lookups.append(head) or lookup(head))
    finish_step(scheduler, scheduler.schedule())
    finish_step(scheduler, scheduler.schedule())
    assert len(lookups) == 1
    while len(scheduler.active) == 1 and not scheduler.active[0].is_context:
        finish_step(scheduler, scheduler.schedule())
    assert 2 <= len(lookups) <= 5  # a lookup for each published block, and one for the release


def test_static_batch_starts_nothing_until_everything_has_ended():
    scheduler, _ = make_scheduler(capacity_scheduler_policy=STATIC_BATCH)
    short, long = make_sequence(4, max_tokens=2), make_sequence(4, max_tokens=5)
    for sequence in (short, long):
        scheduler.add(sequence)
    finish_step(scheduler, scheduler.schedule())
    later = make_sequence(4)
    scheduler.add(later)
    while long.finish_reason is FinishReason.NOT_FINISHED:
        assert later not in scheduler.active
        finish_step(scheduler, scheduler.schedule())
    scheduler.schedule()
    assert scheduler.active == (later,)


def test_static_batch_takes_whole_queue_even_where_its_prompts_need_several_steps():
    scheduler, _ = make_scheduler(tokens=8, capacity_scheduler_policy=STATIC_BATCH)
    for _ in range(3):
        scheduler.add(make_sequence(12))
    scheduler.schedule()
    assert len(scheduler.active) == 3


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
