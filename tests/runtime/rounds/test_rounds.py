"""Rounds on a device, one ahead of the host: the same tokens, and never a token too many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmctl.errors import BadLogits
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.request import FinishReason, Request, SamplingConfig
from llmctl.runtime.rounds.spare_time import SpareTime
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

VOCAB = 23


def random_request(generator: np.random.Generator) -> Request:
    """Mostly requests that a device can run alone, some that it cannot."""
    style = generator.integers(5)
    common = {"seed": int(generator.integers(2**63)), "min_tokens": int(generator.integers(3))}
    config = SamplingConfig(**common)
    if style == 1:
        config = SamplingConfig(temperature=0.7, top_k=0, **common)
    elif style == 2:
        config = SamplingConfig(temperature=1.3, top_k=9, top_p=0.9, **common)
    elif style == 3:
        config = SamplingConfig(presence_penalty=0.5, **common)
    word = tuple(generator.integers(0, VOCAB, 2).tolist())
    return Request(
        input_token_ids=tuple(generator.integers(0, VOCAB, generator.integers(1, 30)).tolist()),
        max_tokens=max(int(generator.integers(1, 60)), config.min_tokens),
        sampling_config=config,
        end_id=int(generator.integers(VOCAB)) if generator.random() < 0.3 else None,
        stop_words=(word,) if generator.random() < 0.3 else (),
    )


def make_harness(fake, agreement, generator, **rest):
    draft, drafter = None, None
    if agreement is not None:
        draft = fake.Engine(
            agreement=agreement,
            max_seq_len=int(generator.choice([96, 50])),
            extra_vocab=int(generator.choice([0, 3])),
        )
        drafter = DraftEngineDrafter(draft, int(generator.integers(1, 7)))
    return fake.Harness(fake.Engine(), drafter, draft=draft, on_device=True, **rest)


@pytest.mark.parametrize("agreement", [None, 1.0, 0.8, 0.0])
@pytest.mark.parametrize("schedule", range(12))
def test_rounds_ahead_of_the_host_give_the_plain_answer(fake, agreement, schedule):
    generator = np.random.default_rng([schedule, int(10 * (agreement or 0))])
    is_small = schedule % 3 == 0
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION if is_small else None
    harness = make_harness(
        fake,
        agreement,
        generator,
        num_blocks=26 if is_small else 200,
        config=SchedulerConfig(policy) if policy else None,
    )
    requests = [random_request(generator) for _ in range(10)]
    harness.run_arriving(generator, requests, horizon=120)
    assert harness.runner.num_rounds > 2


class RandomLengths:
    """Any plan: no drafts, some for all, or each sequence its own."""

    beside_prompts = True

    def __init__(self, generator, most):
        self.generator, self.most, self.common, self.lengths = generator, most, None, {}

    def plan(self, generation):
        common = int(self.generator.integers(self.most + 1))
        own = self.generator.integers(0, self.most + 1, len(generation)).tolist()
        is_common = self.generator.random() < 0.8
        self.common = common if is_common else None
        lengths = [common] * len(own) if is_common else own
        ids = [sequence.sequence_id for sequence in generation]
        self.lengths = dict(zip(ids, lengths, strict=True))

    def of(self, sequence):
        return self.lengths.get(sequence.sequence_id, 0)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("schedule", range(10))
def test_draft_lengths_that_change_from_round_to_round_change_no_token(fake, on_device, schedule):
    generator = np.random.default_rng([schedule, 5])
    draft = fake.Engine(agreement=0.8, max_seq_len=int(generator.choice([96, 50])))
    drafter = DraftEngineDrafter(draft, 6)
    lengths = RandomLengths(np.random.default_rng(schedule), 6)
    harness = fake.Harness(
        fake.Engine(), drafter, draft=draft, on_device=on_device, draft_lengths=lengths
    )
    requests = [random_request(generator) for _ in range(10)]
    requests += [replace(item, max_draft_len=2) for item in requests[:3]]
    harness.run_arriving(generator, requests, horizon=250)
    assert harness.loop.stats.accepted_tokens > 20
    if on_device:
        assert harness.runner.num_rounds > 4


class Planned:
    """So many drafts for everybody, one after the other; the last for ever."""

    beside_prompts = True

    def __init__(self, *lengths):
        self.left, self.common = list(lengths), 0

    def plan(self, generation):
        self.common = self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def of(self, sequence):
        return self.common


def test_a_drafter_left_behind_catches_up_and_the_device_goes_on_by_itself(fake):
    draft = fake.Engine(agreement=1.0)
    harness = fake.Harness(
        fake.Engine(),
        DraftEngineDrafter(draft, 4),
        draft=draft,
        on_device=True,
        draft_lengths=Planned(*[0] * 20, 4),
    )
    sequence = harness.add(request())
    harness.run()
    runner = harness.runner
    assert sequence.tokens[5:] == fake.plain_answer(fake.Engine(), request())[0]
    assert runner.num_caught_up == 1 and runner.num_begun == 2
    drafted, accepted = harness.loop.stats.draft_tokens, harness.loop.stats.accepted_tokens
    assert drafted > 20 and accepted >= drafted - 4  # what it had caught up with was right


@pytest.mark.parametrize("beside", [True, False])
def test_prompts_are_read_without_drafts_beside_them_where_lengths_say_so(fake, beside):
    draft, lengths = fake.Engine(agreement=1.0), Planned(4)
    lengths.beside_prompts = beside
    harness = fake.Harness(
        fake.Engine(), DraftEngineDrafter(draft, 4), draft=draft, on_device=True,
        draft_lengths=lengths,
    )  # fmt: skip
    first, drafted = harness.add(request()), {True: set(), False: set()}
    late = None
    while harness.scheduler.has_work:
        if late is None and len(first.tokens) > 20:
            late = harness.add(request())
        report = harness.step()
        rounds = report.commits[len(report.batch.context) :]
        drafted[bool(report.batch.context)] |= {commit.num_drafts for commit in rounds}
    assert drafted[True] == ({4} if beside else {0}) and 4 in drafted[False]
    wanted, _ = fake.plain_answer(fake.Engine(), request())
    assert first.tokens[5:] == late.tokens[5:] == wanted


def request(max_tokens: int = 60, **rest) -> Request:
    return Request(input_token_ids=(3, 1, 4, 1, 5), max_tokens=max_tokens, **rest)


def test_a_steady_generation_begins_once_and_always_has_a_round_waiting(fake):
    harness = make_harness(fake, None, np.random.default_rng(0))
    harness.add(request())
    harness.run()
    assert harness.runner.num_begun == 1 and harness.runner.most_in_flight == 2
    assert harness.runner.num_rounds == 59  # the prompt's step gave the first token
    assert harness.runner.in_flight == []


@pytest.mark.parametrize("agreement", [None, 1.0, 0.8, 0.0])
def test_no_round_is_left_behind_where_lengths_end_the_last_request(fake, agreement):
    for seed in range(4):
        harness = make_harness(fake, agreement, np.random.default_rng(seed))
        for max_tokens in (9, 37):
            harness.add(request(max_tokens=max_tokens))
            harness.run()
            assert harness.runner.in_flight == []  # a new prompt would wait for it
        assert harness.runner.num_rounds == harness.loop.stats.rounds
        assert harness.runner.most_in_flight == 2  # before the end


def test_rounds_run_ahead_while_one_of_several_requests_is_far_from_its_end(fake):
    harness = make_harness(fake, 0.8, np.random.default_rng(3))
    short, _ = harness.add(request(max_tokens=8)), harness.add(request())
    while len(short.tokens) + harness.runner.draft_len + 1 < short.max_len:
        harness.step()
    assert short.finish_reason is FinishReason.NOT_FINISHED
    harness.loop.launch()
    harness.loop.run_ahead()
    assert len(harness.runner.in_flight) == 2
    harness.loop.finish()
    harness.run()


def test_a_stop_in_one_round_drops_the_round_behind_it(fake):
    plain, _ = fake.plain_answer(fake.Engine(), request())
    harness = make_harness(fake, None, np.random.default_rng(0))
    first = harness.add(request(end_id=plain[20]))
    harness.run()
    end = plain.index(plain[20])
    assert first.tokens[5:] == plain[: end + 1]
    assert first.finish_reason is FinishReason.END_ID
    assert len(harness.runner.in_flight) == 1  # nobody waited for it
    second = harness.add(request())
    harness.run()
    assert second.tokens[5:] == plain


def test_a_new_request_joins_after_the_round_in_flight(fake):
    harness = make_harness(fake, 0.8, np.random.default_rng(1))
    harness.add(request())
    for _ in range(4):
        harness.step()
    late = harness.add(request(max_tokens=5))
    harness.step()  # the round in flight
    report = harness.step()
    assert [item.sequence for item in report.batch.context] == [late]
    harness.run()


def test_a_prompt_that_arrives_early_in_a_round_waits_for_that_round_alone(fake):
    harness = make_harness(fake, 0.8, np.random.default_rng(1))
    harness.rounds._spare = SpareTime(lambda: 0.0)  # no round is late, however busy the host is
    harness.add(request())
    for _ in range(4):
        harness.step()
    harness.loop.launch()
    assert harness.loop.spare_s > 0 and len(harness.runner.in_flight) == 1
    late = harness.add(request(max_tokens=5))
    harness.loop.run_ahead()
    assert harness.loop.spare_s <= 0 and len(harness.runner.in_flight) == 1
    harness.loop.finish()
    report = harness.step()
    assert [item.sequence for item in report.batch.context] == [late]
    harness.run()


def test_rounds_wait_for_no_prompt_that_has_no_place(fake):
    harness = make_harness(fake, None, np.random.default_rng(1))
    harness.scheduler.limits = replace(harness.limits, max_batch_size=2)
    for _ in range(2):
        harness.add(request())
    while harness.runner.num_rounds < 4:
        harness.step()
    harness.loop.launch()
    assert harness.loop.spare_s <= 0 and len(harness.runner.in_flight) == 2
    harness.loop.finish()
    harness.run()


def test_rounds_count_drafts_and_device_time(fake):
    harness = make_harness(fake, 1.0, np.random.default_rng(2))
    harness.add(request(max_tokens=31))
    harness.run()
    stats, draft_len = harness.loop.stats, harness.runner.draft_len
    assert stats.accepted_tokens == stats.draft_tokens
    assert stats.rounds == -(-30 // (draft_len + 1))
    assert stats.draft_s > 0 and stats.verify_s > 0


def test_nan_logits_on_the_device_fail_their_sequence_alone(fake):
    harness = make_harness(fake, None, np.random.default_rng(0))
    sampled = request(50, sampling_config=SamplingConfig(top_k=0, seed=7))
    broken, other = harness.add(request()), harness.add(sampled)
    for _ in range(3):
        harness.step()
    harness.runner.in_flight[0][0].tokens[:] = [-1]
    committed = list(broken.tokens)
    harness.step()
    assert isinstance(broken.error, BadLogits) and broken.tokens == committed
    assert broken.block_table == [] and harness.scheduler.num_active == 1
    again = harness.add(request())
    harness.run()
    assert other.error is None
    assert other.tokens[5:] == fake.plain_answer(harness.target, sampled)[0]
    assert again.tokens[5:] == fake.plain_answer(harness.target, request())[0]
