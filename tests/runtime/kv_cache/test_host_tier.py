"""The host tier's bookkeeping: evicted blocks move to host memory and come back when hit."""

from __future__ import annotations

from support.kv import (
    BLOCK,
    attached,
    fill,
    keep,
    make_sequence,
    num_cached,
    run_and_release,
    start,
)

from llmctl.runtime.kv_cache import BlockCopy, CopyKind, KvCacheManager

OFFLOAD, ONBOARD, WITHIN = CopyKind.OFFLOAD, CopyKind.ONBOARD, CopyKind.WITHIN


def test_an_evicted_block_moves_to_host_memory_and_comes_back_when_hit():
    cache = KvCacheManager(2, BLOCK, num_host_blocks=4)
    first, second = run_and_release(cache, 1, range(8))
    fill(cache, 2, 1)
    assert num_cached(cache, range(8)) == (1, 1)
    assert cache.pending_copies() == [BlockCopy(second, 0, BLOCK, OFFLOAD)]
    again = make_sequence(3, range(9))
    assert cache.match_and_attach(again) == 8
    assert again.block_table[0] == first
    assert cache.pending_copies() == [BlockCopy(0, again.block_table[1], BLOCK, ONBOARD)]
    cache.check_invariants()
    stats = cache.stats()
    assert (stats.offloaded_blocks, stats.onboarded_blocks, stats.evicted_blocks) == (1, 1, 1)
    assert (stats.host_max_num_blocks, stats.host_used_num_blocks) == (4, 0)


def test_a_partly_equal_block_is_copied_straight_from_host_memory_and_stays_there():
    cache = KvCacheManager(2, BLOCK, num_host_blocks=4)
    run_and_release(cache, 1, [1, 2, 3, 4])
    fill(cache, 2, 2)
    cache.pending_copies()
    other = make_sequence(3, [1, 2, 9, 9])
    assert cache.match_and_attach(other) == 2
    assert cache.pending_copies() == [BlockCopy(0, other.block_table[0], 2, ONBOARD)]
    assert num_cached(cache, [1, 2, 3, 4]) == (0, 1)
    cache.check_invariants()


def test_bringing_one_back_may_send_another_away_and_the_order_of_copies_tells_so():
    cache = KvCacheManager(1, BLOCK, num_host_blocks=2)
    run_and_release(cache, 1, [1] * BLOCK)
    run_and_release(cache, 2, [2] * BLOCK)
    cache.pending_copies()
    attached(cache, 3, [1] * BLOCK + [5])
    assert cache.pending_copies() == [
        BlockCopy(0, 1, BLOCK, OFFLOAD),  # the twos make room first
        BlockCopy(0, 0, BLOCK, ONBOARD),
    ]
    cache.check_invariants()


def test_host_memory_gives_up_the_least_valuable_first():
    cache = KvCacheManager(1, BLOCK, num_host_blocks=2)
    for number, priority in ((1, 50), (2, 90), (3, 40), (4, 70)):
        run_and_release(cache, number, [number] * BLOCK, keep(priority))
    # The threes were worth less than what was there; the ones gave way to nobody.
    assert [sum(num_cached(cache, [n] * BLOCK)) for n in (1, 2, 3, 4)] == [1, 1, 0, 1]


def test_blocks_below_the_least_priority_are_dropped_instead():
    cache = KvCacheManager(1, BLOCK, num_host_blocks=4, offload_min_priority=35)
    run_and_release(cache, 1, [1] * BLOCK, keep(34))
    run_and_release(cache, 2, [2] * BLOCK, keep(35))
    fill(cache, 3, 1)
    assert [num_cached(cache, [n] * BLOCK) for n in (1, 2)] == [(0, 0), (0, 1)]


def test_what_continues_a_block_in_host_memory_keeps_it_from_being_dropped():
    cache = KvCacheManager(2, BLOCK, num_host_blocks=4, offload_min_priority=35)
    run_and_release(cache, 1, [1] * 2 * BLOCK, keep(0, end=BLOCK))
    fill(cache, 2, 2)
    assert num_cached(cache, [1] * 2 * BLOCK) == (0, 2)


def test_a_path_too_long_for_the_device_comes_back_in_part():
    cache = KvCacheManager(4, BLOCK, num_host_blocks=8)
    run_and_release(cache, 1, range(16))
    fill(cache, 2, 4)
    holder = attached(cache, 3, [50])
    assert cache.reserve(holder, 2 * BLOCK)
    assert num_cached(cache, range(16)) == (0, 4)
    assert attached(cache, 4, range(17)).kv_len == 8
    cache.check_invariants()


def test_a_block_computed_again_replaces_its_copy_in_host_memory():
    cache = KvCacheManager(4, BLOCK, num_host_blocks=8)
    run_and_release(cache, 1, range(8))
    fill(cache, 2, 4)
    holder = attached(cache, 3, [50])
    assert cache.reserve(holder, 2 * BLOCK + 1)
    late = attached(cache, 4, range(9))
    assert late.kv_len == BLOCK, "only one block was left for it"
    cache.release(holder)
    assert cache.reserve(late, 9)
    late.tokens.append(9)
    late.kv_len = 9
    cache.publish(late)
    cache.check_invariants()
    assert num_cached(cache, range(8)) == (2, 0)
    assert cache.stats().host_used_num_blocks == 0


def test_who_changes_over_to_a_block_on_its_way_waits_for_it():
    cache = KvCacheManager(5, BLOCK, num_host_blocks=8, onboards_aside=True)
    run_and_release(cache, 1, range(8))
    fill(cache, 2, 5)
    holder = attached(cache, 3, [50])
    assert cache.reserve(holder, 4 * BLOCK)
    late = attached(cache, 4, range(9))
    assert late.kv_len == BLOCK, "only one block was left for it"
    cache.release(holder)
    assert cache.reserve(late, 9)
    back = attached(cache, 5, range(9))
    cache.pending_copies()
    cache.arrivals.hand_over()
    assert cache.is_arriving(back) and not cache.arrivals.take_wait()
    late.tokens.append(9)
    late.kv_len = 9
    cache.publish(late)
    assert late.block_table[:2] == back.block_table
    assert cache.arrivals.take_wait()
    cache.check_invariants()


def test_after_a_failure_nothing_is_found_whose_copy_may_be_missing():
    cache = KvCacheManager(2, BLOCK, num_host_blocks=4)
    run_and_release(cache, 1, range(8))
    fill(cache, 2, 1)
    cache.abandon_copies()
    assert cache.pending_copies() == [] and num_cached(cache, range(8)) == (0, 0)
    cache.check_invariants()


def test_without_a_host_tier_a_failure_leaves_what_is_cached():
    cache = KvCacheManager(4, BLOCK)
    run_and_release(cache, 1, range(8))
    cache.release(start(cache, 2, range(9)))
    cache.abandon_copies()
    assert num_cached(cache, range(8)) == (2, 0)
