"""Reuse where whole groups of a prompt's tokens are computed with FP8 products, the rest without.

Groups are of 8 tokens here, and blocks of 4: a prompt of 17 tokens has two groups, one of 16 one.
"""

from __future__ import annotations

import pytest
from support.kv import BLOCK, PAIR, advance, attached, fill, make_sequence, run_and_release, start

from llmctl.plugins.ops.paged_attention.fp8_context import GROUP, context_end
from llmctl.runtime.kv_cache import BlockCopy, KvCacheEventManager, KvCacheManager
from llmctl.runtime.kv_cache.events import block_hash
from llmctl.runtime.schedule.admission import Limits, SchedulerConfig
from llmctl.runtime.schedule.capacity import Capacity

SIZE = 8


def make_cache(num_blocks=32, **options):
    return KvCacheManager(num_blocks, BLOCK, context_group=SIZE, **options)


def test_a_group_ends_before_the_last_token_of_a_prompt():
    assert [context_end(count, 8) for count in (1, 8, 9, 16, 17, 24)] == [0, 0, 8, 8, 16, 16]
    assert context_end(1000, 0) == 0
    assert context_end(GROUP) == 0 and context_end(GROUP + 1) == GROUP


def test_the_same_prompt_finds_all_of_its_blocks_of_both_kinds():
    cache = make_cache()
    table = run_and_release(cache, 1, range(23))  # 16 tokens in groups, and one more block
    again = attached(cache, 2, range(23))
    assert again.kv_len == 16 + BLOCK and again.block_table == table[:5]


def test_a_longer_prompt_reuses_the_groups_and_computes_what_had_other_products():
    cache = make_cache()
    table = run_and_release(cache, 1, range(23))
    longer = attached(cache, 2, range(60))
    assert longer.kv_len == 16 and longer.block_table == table[:4]


def test_a_shorter_prompt_does_not_reuse_groups_that_it_computes_in_16_bits():
    cache = make_cache()
    table = run_and_release(cache, 1, range(41))
    shorter = attached(cache, 2, range(16))  # its second group has its last token
    assert shorter.kv_len == 8 and shorter.block_table == table[:2]


def test_what_was_generated_is_computed_again_as_a_prompt():
    cache = make_cache()
    sequence = start(cache, 1, range(17))
    assert cache.reserve(sequence, 40)
    for token in range(17, 40):
        advance(cache, sequence, token)
    tokens = list(sequence.tokens)
    cache.release(sequence)
    same = attached(cache, 2, range(17))
    assert same.kv_len == 16
    turn = attached(cache, 3, [*tokens, 77])
    assert turn.kv_len == 16, "and no further: 16-bit products computed what comes then"


def test_reuse_ends_at_a_group():
    cache = make_cache()
    run_and_release(cache, 1, [*range(28), 5])
    other = attached(cache, 2, [*range(21), 99, 98, 97, 96, 95, 94, 93, 92])
    assert other.kv_len == 16 and not cache.pending_copies(), "not at the block at 20, or in it"


def test_contents_of_both_kinds_are_cached_beside_each_other():
    cache = make_cache()
    run_and_release(cache, 1, range(16))
    run_and_release(cache, 2, range(41))
    assert attached(cache, 3, range(16)).kv_len == 15
    assert attached(cache, 4, range(41)).kv_len == 40
    hashes = [node.key for node in cache._store.tree.nodes()]
    assert len(hashes) == len(set(hashes)) == 12, "blocks 2 and 3 twice"


def test_a_prefix_that_returns_from_host_memory_ends_at_a_group_where_room_is_short():
    cache = KvCacheManager(6, BLOCK, context_group=SIZE, num_host_blocks=8)
    run_and_release(cache, 1, range(21))
    fill(cache, 2, 6)  # all of it leaves the device
    held = attached(cache, 3, [100])
    assert cache.reserve(held, 3 * BLOCK)  # room for three blocks of the four
    back = attached(cache, 4, range(21))
    assert back.kv_len == 8 and len(back.block_table) == 2
    cache.check_invariants()


def test_the_draft_engines_part_follows_the_targets_blocks():
    cache = make_cache(groups=PAIR)
    run_and_release(cache, 1, range(23))
    assert attached(cache, 2, range(60)).kv_lens == [16, 16]


def test_hashes_of_events_tell_the_kinds_apart():
    cache = make_cache(events=KvCacheEventManager(100))
    start(cache, 1, range(13))
    stored = [event.data for event in cache.events.get_latest_events()][1:]
    blocks = [block for data in stored for block in data.blocks]
    assert [block.is_fp8 for block in blocks] == [True, True, False]
    assert blocks[0].block_hash == block_hash(None, (0, 1, 2, 3), True)
    assert blocks[0].block_hash != block_hash(None, (0, 1, 2, 3))
    assert blocks[2].block_hash == block_hash(blocks[1].block_hash, (8, 9, 10, 11))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "computed", "waits"),
    [
        (41, 0, True),
        (41, 4, True),  # in the group that is needed
        (41, 8, False),
        (8, 0, False),  # the active one computes it in 16 bits
    ],
)
def test_a_prompt_waits_for_a_group_that_another_computes_the_same_way(
    num_prompt_tokens, computed, waits
):
    cache = make_cache()
    active = attached(cache, 1, range(num_prompt_tokens))
    active.kv_lens = [computed]
    capacity = Capacity(SchedulerConfig(), cache, Limits(8, 64, 200))
    capacity.begin()
    head = make_sequence(2, range(50), group=SIZE)
    assert capacity.try_start(head, [active]) is not waits


def test_partial_copies_behind_the_groups_are_of_16_bit_blocks():
    cache = make_cache()
    table = run_and_release(cache, 1, [*range(8), 20, 21, 22, 23, 24])  # a block behind a group
    run_and_release(cache, 2, [*range(8), 20, 21, 22, 23, *range(30, 40)])  # and one with FP8
    other = attached(cache, 3, [*range(8), 20, 21, 99, 98])
    assert other.kv_len == 10
    assert cache.pending_copies() == [BlockCopy(table[2], other.block_table[2], 2)]
