"""Nobody starves: bounds on waiting under streams of long prompts and of high priorities."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import FinishReason, Request, Sequence
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import (
    CapacitySchedulerPolicy,
    Limits,
    Scheduler,
    SchedulerConfig,
)
from llmctl.runtime.schedule.waiting_queue import MOST_OVERTAKES

BLOCK = 4
LONG, SHORT, OUTPUT = 160, 8, 12  # tokens
WHOLE = (
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
)
MOST_WORK = LONG // BLOCK + OUTPUT  # steps a sequence can take where it alone advances


class Stream:
    """One scheduler, sequences that arrive, and when each got its tokens."""

    def __init__(
        self, policy, chunking, *, num_blocks=400, batch=4, tokens=16, draft_len=0, is_whole=False
    ):
        self.cache = KvCacheManager(num_blocks, BLOCK)
        config = SchedulerConfig(policy, chunking, enable_chunked_context=not is_whole)
        limits = Limits(batch, tokens, LONG + OUTPUT, draft_len)
        self.scheduler = Scheduler(config, self.cache, limits)
        self.now = 0
        self.sequences: list[Sequence] = []
        self.arrived: list[int] = []
        self.tokens_at: list[list[int]] = []

    def arrive(self, num_prompt_tokens, max_tokens=OUTPUT, priority=0.5) -> int:
        number = len(self.sequences)
        prompt = [1000 * number + i for i in range(num_prompt_tokens)]
        request = Request(tuple(prompt), max_tokens, priority=priority)
        end = num_prompt_tokens + max_tokens
        sequence = Sequence(number, number, request, 0, prompt, num_prompt_tokens, end)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        self.arrived.append(self.now)
        self.tokens_at.append([])
        return number

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.cache.pending_copies()
        self.now += 1
        for part in batch.slices:
            sequence = part.sequence
            sequence.kv_len = part.start + part.num_tokens
            if part.needs_logits:
                sequence.tokens.append(7)
                self.tokens_at[sequence.sequence_id].append(self.now)
                if len(sequence.tokens) == sequence.max_len:
                    sequence.finish_reason = FinishReason.LENGTH
        self.scheduler.update(batch)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


@settings(max_examples=60)
@given(
    st.sampled_from(CapacitySchedulerPolicy),
    st.sampled_from(ContextChunkingPolicy),
    st.integers(0, 2**32),
)
def test_every_request_gets_its_first_token_within_the_bound(policy, chunking, seed):
    chance = random.Random(seed)
    stream = Stream(policy, chunking)
    bounds = []
    for _ in range(60):  # more long prompts than it can take
        for _ in range(chance.choice([0, 0, 1, 1])):
            ahead, running = stream.scheduler.num_waiting, stream.scheduler.num_active
            bounds.append(MOST_WORK * ((ahead + 1) * (MOST_OVERTAKES + 1) + running))
            length = chance.choice([SHORT, LONG, LONG])
            stream.arrive(length, chance.randint(1, OUTPUT), chance.choice([0.2, 0.5, 1.0]))
        stream.step()
    stream.run()
    for arrived, tokens_at, bound in zip(stream.arrived, stream.tokens_at, bounds, strict=True):
        assert tokens_at[0] - arrived <= bound
        if policy is not CapacitySchedulerPolicy.MAX_UTILIZATION:  # there it may pause
            assert tokens_at == list(range(tokens_at[0], tokens_at[-1] + 1))


@pytest.mark.parametrize("chunking", ContextChunkingPolicy)
def test_generation_goes_on_in_every_step_while_long_prompts_stream_in(chunking):
    stream = Stream(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, chunking)
    first = stream.arrive(SHORT, 40)
    while len(stream.sequences) < 60:
        stream.arrive(LONG)
        stream.step()
    tokens_at = stream.tokens_at[first]
    assert tokens_at == list(range(tokens_at[0], tokens_at[0] + 40))


def test_a_prompt_that_fits_a_step_only_alone_does_not_wait_for_the_end_of_generation():
    """It takes a step for itself, and generation goes on in every second step at least."""
    stream = Stream(*WHOLE, batch=8, tokens=LONG, is_whole=True)
    running = [stream.arrive(SHORT, OUTPUT) for _ in range(3)]
    stream.step()
    long = [stream.arrive(LONG) for _ in range(2)]
    stream.run()
    assert [stream.tokens_at[number][0] for number in long] == [2, 4]
    for number in running:
        assert stream.tokens_at[number][:3] == [1, 3, 5]
        assert stream.tokens_at[number][3:] == list(range(6, 3 + OUTPUT))


def test_nobody_stops_generating_for_a_prompt_that_has_no_room_yet():
    blocks = (SHORT + OUTPUT + LONG) // BLOCK  # the long one's output does not fit
    stream = Stream(*WHOLE, num_blocks=blocks, batch=8, tokens=LONG, is_whole=True)
    first = stream.arrive(SHORT, OUTPUT)
    stream.step()
    long = stream.arrive(LONG, 2)
    stream.run()
    assert stream.tokens_at[first] == list(range(1, OUTPUT + 1))
    assert stream.tokens_at[long][0] == OUTPUT + 1


def test_with_equal_progress_a_short_prompt_does_not_wait_for_long_ones():
    late = {}
    for chunking in ContextChunkingPolicy:
        stream = Stream(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, chunking)
        for _ in range(3):
            stream.arrive(LONG)
        stream.step()
        short = stream.arrive(SHORT)
        stream.run()
        late[chunking] = stream.tokens_at[short][0] - stream.arrived[short]
    assert late[ContextChunkingPolicy.EQUAL_PROGRESS] == 2  # two blocks, one a step
    assert late[ContextChunkingPolicy.FIRST_COME_FIRST_SERVED] >= 3 * LONG // 16


def test_the_lowest_priority_is_paused_first_and_of_equals_the_latest_started():
    stream = Stream(
        CapacitySchedulerPolicy.MAX_UTILIZATION,
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        num_blocks=9,
        tokens=64,
    )
    low, first, second = (stream.arrive(9, priority=p) for p in (0.1, 0.5, 0.5))
    paused = []
    while stream.scheduler.has_work:
        stream.step()
        waiting = [s.sequence_id for s in stream.scheduler.waiting]
        paused += [number for number in waiting if number not in paused]
    assert paused == [low, second] and stream.scheduler.num_paused == 2
    assert all(len(tokens_at) == OUTPUT for tokens_at in stream.tokens_at)
    assert stream.tokens_at[first][-1] < stream.tokens_at[second][-1]
