"""Who may start and who pauses, by capacity policy, and equal prompts that arrive together."""

from __future__ import annotations

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

from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import FinishReason
from llmctl.runtime.schedule.scheduler import (
    Limits,
    Scheduler,
    SchedulerConfig,
)


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
