"""The KV cache's rules: reuse, partial copies, publication, eviction, statistics."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.kv import BLOCK, PAIR, advance, attached, make_sequence, run_and_release, start

from llmctl.errors import BadConfig
from llmctl.runtime.kv_cache import BlockCopy, KvCacheManager


def test_full_blocks_of_a_finished_sequence_are_reused():
    cache = KvCacheManager(16, BLOCK)
    table = run_and_release(cache, 1, range(10))
    again = make_sequence(2, range(10))
    # Two full blocks, and one token of the third would be the last prompt token: never reused.
    assert cache.match_and_attach(again) == again.kv_len == 8
    assert again.block_table == table[:2]
    assert cache.pending_copies() == []


def test_the_last_prompt_token_is_always_recomputed():
    cache = KvCacheManager(16, BLOCK, enable_partial_reuse=False)
    run_and_release(cache, 1, range(8))
    assert cache.match_and_attach(make_sequence(2, range(8))) == 4
    assert cache.match_and_attach(make_sequence(3, range(9))) == 8
    assert cache.match_and_attach(make_sequence(4, [0])) == 0


def test_a_partly_equal_block_is_copied_into_a_private_one():
    cache = KvCacheManager(16, BLOCK)
    table = run_and_release(cache, 1, range(8))
    other = make_sequence(2, [0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert cache.match_and_attach(other) == 6
    assert other.block_table[0] == table[0] and other.block_table[1] not in table
    assert cache.pending_copies() == [BlockCopy(table[1], other.block_table[1], 2)]
    assert cache.pending_copies() == [], "each copy is handed over once"


@pytest.mark.parametrize("best_first", [True, False])
def test_the_longest_partial_match_wins_and_keeps_one_token_back(best_first):
    cache = KvCacheManager(16, BLOCK)
    prompts = [[1, 2, 3, 4], [1, 2, 8, 8]]
    tables = {}
    for number, prompt in enumerate(prompts if best_first else reversed(prompts)):
        tables[tuple(prompt)] = run_and_release(cache, number, prompt)
    cache.pending_copies()
    again = make_sequence(3, [1, 2, 3, 4])
    assert cache.match_and_attach(again) == 3
    (best,) = tables[1, 2, 3, 4]
    assert cache.pending_copies() == [BlockCopy(best, again.block_table[0], 3)]


def test_a_block_that_was_copied_from_is_not_the_next_to_be_evicted():
    cache = KvCacheManager(2, BLOCK)
    run_and_release(cache, 1, [1, 1, 1, 1])
    run_and_release(cache, 2, [2, 2, 2, 2])
    cache.match_and_attach(make_sequence(3, [1, 1, 5]))  # takes the block of the twos
    assert cache.lookup(make_sequence(4, [1] * 5)).full.depth == 1
    assert cache.lookup(make_sequence(5, [2] * 5)).full.depth == 0


def test_a_running_sequence_shares_its_published_blocks():
    cache = KvCacheManager(16, BLOCK)
    first = start(cache, 1, range(9))
    second = start(cache, 2, [*range(8), 50])
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    cache.release(first)
    cache.check_invariants()
    assert cache.stats().used_num_blocks == 3


def test_the_last_block_left_is_taken_over_instead_of_copied():
    cache = KvCacheManager(1, BLOCK)
    table = run_and_release(cache, 1, [1, 2, 3, 4])
    other = make_sequence(2, [1, 2, 9, 9])
    assert cache.match_and_attach(other) == 2
    assert other.block_table == table and cache.pending_copies() == []
    cache.check_invariants()


def test_a_partial_match_is_skipped_where_no_block_is_left_for_the_copy():
    cache = KvCacheManager(2, BLOCK)
    first = start(cache, 1, range(4))
    assert cache.reserve(first, 8)
    other = make_sequence(2, [0, 1, 9])
    assert cache.match_and_attach(other) == 0 and other.block_table == []


def test_copies_come_in_an_order_that_reads_a_source_before_it_is_overwritten():
    cache = KvCacheManager(2, BLOCK)
    (a,) = run_and_release(cache, 1, [1, 1, 1, 1])
    (b,) = run_and_release(cache, 2, [2, 2, 2, 2])
    cache.match_and_attach(make_sequence(3, [2, 2, 5]))  # evicts a, the older
    cache.match_and_attach(make_sequence(4, [2, 7, 7]))  # b is all that is left
    assert cache.pending_copies() == [BlockCopy(b, a, 2)]
    cache.check_invariants()


def test_only_full_blocks_of_committed_tokens_are_published():
    cache = KvCacheManager(16, BLOCK, enable_partial_reuse=False)
    sequence = start(cache, 1, range(7))
    assert cache.match_and_attach(make_sequence(2, range(30))) == 4
    sequence.tokens[7] = 7
    advance(cache, sequence, 8)
    assert cache.match_and_attach(make_sequence(3, range(30))) == 8


def test_with_a_draft_blocks_are_published_only_where_both_caches_are_valid():
    cache = KvCacheManager(16, BLOCK, groups=PAIR)
    sequence = make_sequence(1, range(9))
    cache.match_and_attach(sequence)
    assert cache.reserve(sequence, 9)
    sequence.kv_lens = [8, 7]
    cache.publish(sequence)
    other = make_sequence(2, range(9))
    assert cache.match_and_attach(other) == 4
    assert other.kv_lens == [4, 4]


def test_a_hit_without_a_draft_sets_the_targets_length_alone():
    cache = KvCacheManager(16, BLOCK)
    run_and_release(cache, 1, range(9))
    other = make_sequence(2, range(9))
    cache.match_and_attach(other)
    assert other.kv_lens == [8]


def test_sequences_that_computed_the_same_block_end_up_with_one_copy():
    cache = KvCacheManager(16, BLOCK)
    twins = [make_sequence(number, range(9)) for number in (1, 2)]
    for twin in twins:
        cache.match_and_attach(twin)
        assert cache.reserve(twin, 9)
    assert cache.stats().used_num_blocks == 6
    for twin in twins:
        advance(cache, twin, 9 + twin.sequence_id)
    assert twins[0].block_table[:2] == twins[1].block_table[:2]
    assert twins[0].block_table[2] != twins[1].block_table[2]
    assert cache.stats().used_num_blocks == 4


def test_the_least_recently_used_leaf_is_evicted_first():
    cache = KvCacheManager(4, BLOCK, enable_partial_reuse=False)
    run_and_release(cache, 1, [1] * 8)
    run_and_release(cache, 2, [2] * 8)
    run_and_release(cache, 3, [1] * 8)  # a hit on its first block, which makes both newer
    assert cache.reserve(attached(cache, 4, [3]), BLOCK)
    assert cache.lookup(make_sequence(5, [1] * 9)).full.depth == 2
    assert cache.lookup(make_sequence(6, [2] * 9)).full.depth == 1, "the leaf goes, not the root"


def test_blocks_in_use_are_never_evicted():
    cache = KvCacheManager(4, BLOCK)
    holder = start(cache, 1, range(12))
    other = attached(cache, 2, [50, 51])
    assert cache.reserve(other, 4)
    assert not cache.reserve(other, 5)
    assert len(other.block_table) == 1, "a refused reservation changes nothing"
    assert len(holder.block_table) == 3
    cache.check_invariants()


def test_reserve_evicts_as_much_as_it_needs():
    cache = KvCacheManager(4, BLOCK)
    run_and_release(cache, 1, range(16))
    other = attached(cache, 2, [50])
    assert cache.max_reservable_tokens(other) == 16
    assert cache.reserve(other, 16)
    cache.check_invariants()


def test_release_forgets_nothing_that_was_published_and_resets_the_sequence():
    cache = KvCacheManager(4, BLOCK, groups=PAIR)
    sequence = start(cache, 1, range(10))
    cache.release(sequence)
    assert (sequence.block_table, sequence.kv_lens) == ([], [0, 0])
    assert cache.stats().free_num_blocks == 4
    assert cache.match_and_attach(make_sequence(2, range(10))) == 8


def test_without_reuse_nothing_is_shared():
    cache = KvCacheManager(16, BLOCK, enable_block_reuse=False)
    run_and_release(cache, 1, range(10))
    assert cache.match_and_attach(make_sequence(2, range(10))) == 0
    assert cache.pending_copies() == []


def test_statistics_count_blocks_and_reading_them_changes_nothing():
    cache = KvCacheManager(16, BLOCK)
    run_and_release(cache, 1, range(10))  # 3 blocks to fill, 3 allocated
    second = make_sequence(2, [*range(6), *range(60, 70)])  # 1 full hit, 1 copy, 2 missed
    cache.match_and_attach(second)
    assert cache.reserve(second, 16)
    stats = cache.stats()
    assert stats == cache.stats()
    assert (stats.max_num_blocks, stats.tokens_per_block) == (16, BLOCK)
    assert (stats.used_num_blocks, stats.free_num_blocks) == (4, 12)
    assert (stats.alloc_new_blocks, stats.alloc_total_blocks) == (6, 7)
    assert (stats.reused_blocks, stats.missed_blocks) == (2, 5)
    assert stats.cache_hit_rate == pytest.approx(2 / 7)
    assert KvCacheManager(1, 1).stats().cache_hit_rate == 0


@pytest.mark.parametrize(("num_blocks", "tokens_per_block"), [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(num_blocks, tokens_per_block):
    with pytest.raises(BadConfig, match="holds nothing"):
        KvCacheManager(num_blocks, tokens_per_block)


def corrupt_free_list(cache, sequence):
    cache._store.free.append(sequence.block_table[-1])


def corrupt_table(cache, sequence):
    sequence.block_table.pop()


def corrupt_user_count(cache, sequence):
    cache._leases[sequence.sequence_id].tail.num_users += 1


def corrupt_content(cache, sequence):
    sequence.tokens[0] += 1


@pytest.mark.parametrize(
    "corrupt", [corrupt_free_list, corrupt_table, corrupt_user_count, corrupt_content]
)
def test_the_invariant_check_notices_corruption(corrupt):
    cache = KvCacheManager(16, BLOCK)
    sequence = start(cache, 1, range(10))
    corrupt(cache, sequence)
    with pytest.raises(AssertionError):
        cache.check_invariants()


class CacheMachine(RuleBasedStateMachine):
    """Sequences over two token values come, grow, publish and go in any order."""

    running = Bundle("running")

    def __init__(self):
        super().__init__()
        self.cache = KvCacheManager(7, 2, groups=PAIR)
        self.next_id = 0

    @rule(target=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def attach(self, tokens):
        sequence = make_sequence(self.next_id, tokens)
        self.next_id += 1
        match = self.cache.lookup(sequence)
        num_available = self.cache.num_available_blocks
        reused = self.cache.attach(sequence, match)
        assert sequence.kv_lens[1] <= reused < len(tokens)
        assert match.num_blocks_in_use <= match.full.depth
        cost = len(sequence.block_table) - match.num_blocks_in_use
        assert self.cache.num_available_blocks == num_available - cost
        self.cache.pending_copies()
        return sequence

    @rule(sequence=running, num_tokens=st.integers(1, 14), token=st.integers(0, 1))
    def grow(self, sequence, num_tokens, token):
        fits = num_tokens <= self.cache.max_reservable_tokens(sequence)
        assert self.cache.reserve(sequence, num_tokens) == fits
        if fits and num_tokens >= sequence.kv_len:
            while len(sequence.tokens) <= num_tokens:
                sequence.tokens.append(token)
            sequence.kv_len = num_tokens

    @rule(sequence=running)
    def draft_catches_up(self, sequence):
        sequence.kv_lens[1] = sequence.kv_len

    @rule(sequence=running)
    def publish(self, sequence):
        self.cache.publish(sequence)

    @rule(sequence=consumes(running))
    def release(self, sequence):
        self.cache.release(sequence)

    @invariant()
    def everything_adds_up(self):
        self.cache.check_invariants()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40)
