"""What stays in the KV cache when room is needed: priorities, their durations, recency."""

from __future__ import annotations

import pytest
from support.kv import BLOCK, Clock, fill, keep, make_sequence, num_cached, run_and_release, start

from llmctl.errors import BadConfig
from llmctl.runtime.api.retention import (
    KvCacheRetentionConfig,
    Retention,
    TokenRangeRetentionConfig,
)
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.kv_cache.eviction import LazyHeap
from llmctl.runtime.kv_cache.radix_tree import Node


def test_the_lowest_priority_goes_first_however_recent():
    cache = KvCacheManager(3, BLOCK)
    run_and_release(cache, 1, [1] * BLOCK, keep(80))
    run_and_release(cache, 2, [2] * BLOCK)
    run_and_release(cache, 3, [3] * BLOCK, keep(10))
    left = []
    for number in (1, 2, 3):
        fill(cache, 10 + number, number)
        left.append([sum(num_cached(cache, [token] * BLOCK)) for token in (1, 2, 3)])
    assert left == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_within_a_priority_the_least_recently_used_goes_first():
    cache = KvCacheManager(3, BLOCK)
    for token in (1, 2, 3):
        run_and_release(cache, token, [token] * BLOCK, keep(80))
    run_and_release(cache, 4, [1] * BLOCK + [5])  # a hit makes it the newest
    fill(cache, 5, 1)
    assert [sum(num_cached(cache, [token] * BLOCK)) for token in (1, 2, 3)] == [1, 0, 1]


def test_only_leaves_go_so_a_low_priority_prefix_stays_while_what_continues_it_does():
    cache = KvCacheManager(4, BLOCK)
    ranges = (
        TokenRangeRetentionConfig(0, BLOCK, 0),
        TokenRangeRetentionConfig(BLOCK, None, 100),
    )
    run_and_release(cache, 1, [1] * 2 * BLOCK, KvCacheRetentionConfig(ranges))
    run_and_release(cache, 2, [2] * BLOCK)
    fill(cache, 3, 2)
    assert num_cached(cache, [1] * 2 * BLOCK) == (2, 0)
    assert num_cached(cache, [2] * BLOCK) == (0, 0)


def test_a_priority_ends_when_its_time_after_the_last_use_is_over():
    clock = Clock()
    cache = KvCacheManager(2, BLOCK, clock=clock)
    holder = start(cache, 1, [1] * BLOCK, keep(80, duration_ms=2000))
    clock.now += 50  # time does not run while somebody uses it
    cache.release(holder)
    run_and_release(cache, 2, [2] * BLOCK, keep(50))
    clock.now += 1.9
    fill(cache, 3, 1)
    assert [sum(num_cached(cache, [token] * BLOCK)) for token in (1, 2)] == [1, 0]
    run_and_release(cache, 2, [2] * BLOCK, keep(50))
    clock.now += 0.2
    fill(cache, 4, 1)
    assert [sum(num_cached(cache, [token] * BLOCK)) for token in (1, 2)] == [0, 1]


def test_a_hit_starts_the_duration_again():
    clock = Clock()
    cache = KvCacheManager(2, BLOCK, clock=clock)
    run_and_release(cache, 1, [1] * BLOCK, keep(80, duration_ms=2000))
    clock.now += 1.5
    run_and_release(cache, 2, [1] * BLOCK + [5])
    run_and_release(cache, 3, [2] * BLOCK, keep(50))
    clock.now += 1.5
    fill(cache, 4, 1)
    assert [sum(num_cached(cache, [token] * BLOCK)) for token in (1, 2)] == [1, 0]


def test_a_request_that_says_nothing_leaves_a_priority_as_it_is_and_one_that_does_sets_it():
    cache = KvCacheManager(3, BLOCK)
    run_and_release(cache, 1, [1] * BLOCK, keep(80))
    run_and_release(cache, 2, [1] * BLOCK + [5])
    run_and_release(cache, 3, [2] * BLOCK, keep(50))
    fill(cache, 4, 2)
    assert num_cached(cache, [1] * BLOCK) == (1, 0)
    run_and_release(cache, 5, [2] * BLOCK, keep(50))
    run_and_release(cache, 6, [1] * BLOCK + [5], keep(0))
    fill(cache, 7, 2)
    assert num_cached(cache, [1] * BLOCK) == (0, 0)


def test_output_blocks_have_a_priority_of_their_own():
    cache = KvCacheManager(8, BLOCK)
    config = KvCacheRetentionConfig(
        (TokenRangeRetentionConfig(0, None, 90),), decode_retention_priority=5
    )
    sequence = make_sequence(1, [1] * (BLOCK + 2), config)
    cache.match_and_attach(sequence)
    assert cache.reserve(sequence, 3 * BLOCK)
    sequence.tokens += [7] * (2 * BLOCK)
    sequence.kv_len = 3 * BLOCK
    cache.publish(sequence)
    node, priorities = cache._leases[1].tail, []
    while node.parent is not None:
        priorities.append(node.priority)
        node = node.parent
    # The second block begins in the prompt, so it belongs there.
    assert priorities == [5, 90, 90]


def test_a_block_belongs_to_the_range_of_its_first_token():
    config = KvCacheRetentionConfig(
        (
            TokenRangeRetentionConfig(0, 10, 90),
            TokenRangeRetentionConfig(20, None, 60, duration_ms=5.0),
        ),
        decode_retention_priority=7,
        decode_duration_ms=3.0,
    )
    found = [config.of_block(first, 40) for first in range(0, 48, 8)]
    late = Retention(60, 5.0)
    assert found == [(90, None), (90, None), None, late, late, Retention(7, 3.0)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenRangeRetentionConfig(-1), "token_start is -1"),
        (lambda: TokenRangeRetentionConfig(4, 4), "token_end is 4; it must be greater"),
        (lambda: TokenRangeRetentionConfig(0, None, 101), "priority is 101"),
        (lambda: TokenRangeRetentionConfig(0, None, 5, 0.0), "duration_ms is 0.0"),
        (lambda: KvCacheRetentionConfig(decode_retention_priority=-1), "decode_retention_priority"),
        (lambda: KvCacheRetentionConfig(decode_duration_ms=-1.0), "decode_duration_ms is -1.0"),
        (
            lambda: KvCacheRetentionConfig(
                (TokenRangeRetentionConfig(8, 12), TokenRangeRetentionConfig(0, 9))
            ),
            r"\[0, 9\) and \[8, \.\.\.\) overlap",
        ),
        (
            lambda: KvCacheRetentionConfig(
                (TokenRangeRetentionConfig(0), TokenRangeRetentionConfig(50))
            ),
            r"\[0, the end\) and \[50, \.\.\.\) overlap",
        ),
    ],
)
def test_a_retention_out_of_range_is_refused_by_name(make, words):
    with pytest.raises(BadConfig, match=words):
        make()


def test_stale_entries_of_a_heap_do_not_pile_up():
    node = Node(None, (), 0)
    heap = LazyHeap(lambda key, item: key == (0, item.last_used), capacity=1)
    for tick in range(1000):
        node.last_used = tick
        heap.push((0, tick), node)
        assert len(heap) <= 66
    assert heap.peek() == ((0, 999), node)


def test_hits_without_evictions_keep_the_bookkeeping_small():
    cache = KvCacheManager(8, BLOCK)
    for number in range(500):
        run_and_release(cache, number, [1] * 9, keep(80, duration_ms=1e9))
    store = cache._store
    assert max(len(store.victims), len(store._expiring)) <= 2 * 8 + 64
