"""A ring of blocks: with a window in every layer a sequence holds as many blocks at token 10,000 as
at token 1,000, and what it can see is always there."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv import BLOCK, PAIR, attached, make_sequence, num_cached, run_and_release

from llmctl.errors import BadConfig, OutOfMemory
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.engines.memory_plan import plan_kv_cache
from llmctl.runtime.kv_cache import (
    AttentionWindow,
    KvCacheManager,
    common_window,
    most_step_tokens,
)
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

SIZE, SINKS, TILE = 24, 3, 4


@pytest.fixture
def windowed(fake):
    """A fake engine that sees the sinks and the end of its window, and nothing else."""

    class Windowed(fake.Engine):
        def __init__(self, size=SIZE, sinks=SINKS, **rest) -> None:
            super().__init__(**rest)
            self.reach, self.sinks = size - sinks, sinks

        def logits(self, tokens):
            tokens = np.asarray(tokens, np.int64)
            first = max(self.sinks, len(tokens) - self.reach)
            return super().logits(np.concatenate([tokens[: self.sinks], tokens[first:]]))

        def read(self, table, places):
            """The cached tokens, with zeros where nobody looks."""
            positions = np.arange(places) if isinstance(places, int) else places
            length = len(positions)
            seen = np.arange(length) < self.sinks
            seen |= np.arange(length) >= length - self.reach
            blocks = np.asarray(table, np.int64)[positions // self.tokens_per_block]
            found = self.cache[blocks * self.tokens_per_block + positions % self.tokens_per_block]
            assert (found[seen] >= 0).all(), "a slot that was never written"
            return np.where(seen, found, 0)

    return Windowed


@pytest.fixture
def harness_of(fake):
    class WindowHarness(fake.Harness):
        def audit(self) -> None:
            self.kv_cache.check_invariants()
            reach = SIZE - SINKS
            for sequence in self.scheduler.active:
                size, table = self.target.tokens_per_block, sequence.block_table
                for position in range(sequence.kv_len):
                    if position < SINKS or position > sequence.kv_len - reach:  # seen from kv_len
                        slot = table[position // size] * size + position % size
                        assert self.target.cache[slot] == sequence.tokens[position]
                most = self.kv_cache.num_blocks_to_hold(sequence, 10**9)
                assert self.kv_cache.num_held_blocks(sequence) <= most

    return WindowHarness


def ring(**rest):
    return AttentionWindow(SIZE, SINKS, key_tile=TILE, group_lag=8, **rest)


@pytest.mark.parametrize("policy", list(CapacitySchedulerPolicy))
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("agreement", [None, 1.0, 0.8])
def test_answers_from_a_ring_are_those_of_the_mask(
    windowed, harness_of, fake, policy, on_device, agreement
):
    target = windowed(max_seq_len=600, max_batch_size=3)
    draft, drafter = None, None
    if agreement is not None:
        draft = windowed(max_seq_len=600, agreement=agreement)
        drafter = DraftEngineDrafter(draft, 4)
    harness = harness_of(
        target,
        drafter,
        draft=draft,
        num_blocks=74,
        window=ring(),
        config=SchedulerConfig(policy),
        on_device=on_device,
    )
    generator = np.random.default_rng(3)
    requests = [
        Request(
            tuple(generator.integers(0, 23, generator.integers(1, 150)).tolist()),
            max_tokens=int(generator.integers(1, 200)),
            sampling_config=SamplingConfig(temperature=0.8, top_k=0, seed=seed),
        )
        for seed in range(8)
    ]
    sequences = [harness.add(request) for request in requests]
    harness.run()
    for request, sequence in zip(requests, sequences, strict=True):
        wanted, _ = fake.plain_answer(target, request)
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
    assert harness.kv_cache.stats().used_num_blocks == 0


def test_memory_stays_the_same_over_fifty_windows(windowed, harness_of, fake):
    target = windowed(max_seq_len=2000, max_batch_size=2)
    harness = harness_of(target, num_blocks=40, window=ring())
    request = Request(tuple(range(9)), max_tokens=50 * SIZE)
    sequence = harness.add(request)
    held = []
    while harness.scheduler.has_work:
        harness.step()
        if harness.scheduler.active:
            held.append(harness.kv_cache.num_held_blocks(sequence))
    assert sequence.tokens[9:] == fake.plain_answer(target, request)[0]
    assert len(held) > 49 * SIZE
    at_first, later = max(held[: 3 * SIZE]), max(held[3 * SIZE :])
    # Sinks, window, and a tile and a block at their borders; a cache of every token is 303 blocks.
    assert later <= at_first <= SIZE // BLOCK + 5


def test_a_prompt_longer_than_the_pool_runs_in_chunks_through_the_ring(windowed, harness_of, fake):
    target = windowed(max_seq_len=2000)
    harness = harness_of(target, num_blocks=40, window=ring())
    request = Request(tuple(int(i) for i in np.arange(1500) * 7 % 23), max_tokens=20)
    sequence = harness.add(request)
    harness.run()
    assert sequence.tokens[1500:] == fake.plain_answer(target, request)[0]


@pytest.mark.parametrize("agreement", [None, 0.8])
def test_the_memory_plan_has_room_for_a_full_batch_of_rings_and_no_more_than_twice_that(
    windowed, harness_of, agreement
):
    length, batch = 1600, 4
    target = windowed(max_seq_len=length, max_batch_size=batch)
    target.kv_bytes_per_block, target.max_draft_len = 1000, 4
    draft, drafter = None, None
    if agreement is not None:
        draft = windowed(max_seq_len=length, agreement=agreement)
        drafter = DraftEngineDrafter(draft, 4)
    step_tokens = most_step_tokens(target.max_num_tokens, target.max_draft_len)
    asked = {"free_bytes": 10**12, "window": ring(), "max_step_tokens": step_tokens}
    plan = plan_kv_cache([target], **asked)
    per_sequence = ring().most_blocks(step_tokens, BLOCK)
    assert plan.num_blocks == 2 * batch * per_sequence + 1 < 2 * batch * length / BLOCK / 5
    # Half of the plan, the half that is not there for reuse, runs the batch without a wait.
    harness = harness_of(
        target,
        drafter,
        draft=draft,
        num_blocks=plan.num_blocks // 2 + 1,
        window=ring(),
        config=SchedulerConfig(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
    )
    prompt = tuple(int(i) for i in np.arange(600) * 7 % 23)
    for index in range(batch):
        harness.add(Request(prompt[index:], max_tokens=400))
    is_full = False
    while harness.scheduler.has_work:
        harness.step()
        is_full = is_full or harness.scheduler.num_active == batch
    assert is_full


def test_a_window_as_long_as_a_sequence_costs_no_more_than_the_sequence(windowed):
    target = windowed(max_seq_len=40)
    target.kv_bytes_per_block = 1000
    wide = AttentionWindow(39)
    plan = plan_kv_cache([target], free_bytes=10**12, window=wide, max_step_tokens=48)
    assert plan.num_blocks == 2 * target.max_batch_size * 10 + 1


def make_cache(num_blocks=40, **rest):
    return KvCacheManager(num_blocks, BLOCK, window=ring(), max_step_tokens=BLOCK, **rest)


def test_what_was_given_back_can_be_taken_by_others():
    cache = make_cache(16)
    first = make_sequence(1, range(100))
    cache.match_and_attach(first)
    for end in range(BLOCK, 101, BLOCK):
        assert cache.reserve(first, end)
        first.kv_len = end - 1
        cache.publish(first)
        cache.check_invariants()
    assert len(first.block_table) == 25 and cache.num_held_blocks(first) == 7
    # The sinks' block, then the ring from the tile of position 79 on, which starts at 76.
    null = cache._null_block
    assert [index for index, block in enumerate(first.block_table) if block != null] == [
        0, *range(19, 25)
    ]  # fmt: skip
    second = attached(cache, 2, [50])
    assert cache.reserve(second, 8 * BLOCK) and not cache.reserve(second, 8 * BLOCK + 1)
    cache.release(first)
    cache.check_invariants()
    assert cache.stats().used_num_blocks == 8


def test_a_sequence_that_outgrows_the_window_takes_no_part_in_reuse_and_a_short_one_does():
    cache = make_cache()
    run_and_release(cache, 1, range(12))  # ends within the window
    assert num_cached(cache, range(12)) == (3, 0)
    assert cache.match_and_attach(make_sequence(2, range(10))) == 9
    assert cache.match_and_attach(make_sequence(3, range(10), max_tokens=SIZE)) == 0


def test_a_draft_that_lags_keeps_its_own_window():
    cache = make_cache(groups=PAIR)
    sequence = make_sequence(1, range(100))
    cache.match_and_attach(sequence)
    assert cache.reserve(sequence, 100)
    sequence.kv_lens = [90, 10]
    cache.publish(sequence)  # too far behind: it may guess worse, and holds no more for that
    assert cache.num_held_blocks(sequence) == 1 + 25 - ring().oldest(82) // BLOCK
    sequence.kv_lens[1] = 85
    cache.publish(sequence)
    assert ring().oldest(85) == 64
    assert sequence.block_table[16] != cache._null_block == sequence.block_table[15]


def test_a_sequence_whose_ring_is_larger_than_the_pool_is_refused(windowed, harness_of):
    harness = harness_of(windowed(max_seq_len=2000), num_blocks=10, window=ring())
    with pytest.raises(OutOfMemory, match="the cache has 9"):
        harness.add(Request((1, 2, 3), max_tokens=500))


def test_one_layer_that_sees_everything_keeps_every_block():
    assert common_window([(8, 16), (32,)], 2) == AttentionWindow(32, 2)
    assert common_window([(8, 0), (32,)]) is None
    assert common_window([]) is None


@pytest.mark.parametrize(("size", "sinks"), [(0, 0), (4, 4), (4, -1)])
def test_a_window_that_cannot_be_is_refused(size, sinks):
    with pytest.raises(BadConfig, match="window"):
        AttentionWindow(size, sinks)
