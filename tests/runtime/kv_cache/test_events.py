"""Events of the KV cache: what a reader outside can reconstruct from them."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv import BLOCK, Clock, run_and_release, start

from llmctl.runtime.api.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from llmctl.runtime.kv_cache import KvCacheEventManager, KvCacheManager
from llmctl.runtime.kv_cache.events import (
    Change,
    KvCacheCreatedData,
    KvCacheRemovedData,
    KvCacheStoredData,
    KvCacheUpdatedData,
    block_hash,
)


def make_cache(num_blocks, **options):
    return KvCacheManager(num_blocks, BLOCK, events=KvCacheEventManager(1000), **options)


def drain(cache):
    return [event.data for event in cache.events.get_latest_events()]


def test_stored_blocks_are_named_after_their_tokens_and_their_parents():
    cache = make_cache(8)
    assert drain(cache) == [KvCacheCreatedData((8,))]
    start(cache, 1, range(9))
    first, second = drain(cache)
    assert isinstance(first, KvCacheStoredData) and first.parent_hash is None
    assert first.blocks[0].tokens == (0, 1, 2, 3) and first.blocks[0].priority == 35
    assert second.parent_hash == first.blocks[0].block_hash
    assert second.blocks[0].block_hash == block_hash(second.parent_hash, (4, 5, 6, 7))


def test_a_hash_is_the_same_in_every_process_and_differs_by_place():
    assert block_hash(None, (1, 2)) == 0x089AD6AD93B140D7
    assert len({block_hash(None, (1, 2)), block_hash(0, (1, 2)), block_hash(None, (2, 1))}) == 3


def test_an_evicted_block_is_removed_and_one_with_another_priority_updated():
    clock = Clock()
    cache = make_cache(1, clock=clock)
    config = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, None, 80, 1000.0),))
    run_and_release(cache, 1, range(4), config)
    run_and_release(cache, 2, range(50, 54))
    name = block_hash(None, (0, 1, 2, 3))
    assert drain(cache)[2:4] == [
        KvCacheUpdatedData(name, priority=Change(35, 80)),
        KvCacheRemovedData((name,)),
    ]


def test_the_buffer_is_bounded_and_ids_tell_what_was_missed():
    cache = KvCacheManager(8, BLOCK, events=KvCacheEventManager(2))
    start(cache, 1, range(17))
    assert [event.event_id for event in cache.events.get_latest_events()] == [3, 4]
    assert cache.events.get_latest_events() == []


def test_a_reader_may_wait_for_the_next_event():
    cache = make_cache(8)
    drain(cache)
    assert cache.events.get_latest_events(timeout_s=0.01) == []
    found = []
    reader = threading.Thread(target=lambda: found.extend(cache.events.get_latest_events(30.0)))
    reader.start()
    run_and_release(cache, 1, range(4))
    reader.join(timeout=30)
    assert not reader.is_alive() and len(found) == 1


def test_without_a_buffer_nothing_is_hashed():
    cache = KvCacheManager(8, BLOCK)
    sequence = start(cache, 1, range(9))
    assert cache._leases[sequence.sequence_id].tail.block_hash is None
    assert cache.events.get_latest_events() == []


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 100)),
        max_size=12,
    ),
    st.sampled_from([0, 3]),
)
def test_events_alone_tell_what_is_cached_where(requests, num_host_blocks):
    cache = KvCacheManager(
        6, 2, events=KvCacheEventManager(10_000), num_host_blocks=num_host_blocks
    )
    for number, (tokens, priority) in enumerate(requests):
        config = KvCacheRetentionConfig((TokenRangeRetentionConfig(0, None, priority),))
        if len(tokens) <= 12:
            run_and_release(cache, number, tokens, config)
    known = {}
    for data in drain(cache):
        if isinstance(data, KvCacheStoredData):
            assert data.parent_hash is None or data.parent_hash in known
            known |= {
                block.block_hash: [block.cache_level, block.priority] for block in data.blocks
            }
        elif isinstance(data, KvCacheRemovedData):
            for name in data.block_hashes:
                del known[name]
        elif isinstance(data, KvCacheUpdatedData):
            for index, change in enumerate((data.cache_level, data.priority)):
                if change is not None:
                    assert known[data.block_hash][index] == change.old_value
                    known[data.block_hash][index] = change.new_value
    nodes = cache._store.tree.nodes()
    assert known == {node.block_hash: [int(not node.is_on_device), node.priority] for node in nodes}
