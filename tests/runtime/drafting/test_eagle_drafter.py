"""Chains from an EAGLE head: which pairs it reads, its cache, exact text."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_eagle import FakeEagleHead, FeaturedEngine
from support.fake_loop import Harness
from support.head_schedules import (
    drafts_after_a_missed_step,
    go_on_after_a_step_that_failed,
    prompts,
    run_any_schedule,
)

from llmctl.builder.engine_format import parse_choices
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.eagle.drafter import EagleDrafter
from llmctl.runtime.drafting.growth.growth import DynamicShape, StaticShape
from llmctl.runtime.request import Request, SamplingConfig

VOCAB = 23


SHAPE = DynamicShape(num_offers=3, width=4)
CHOICES = parse_choices("[[0],[1],[0,0],[0,1],[1,0],[0,0,0],[0,0,1],[0,0,0,0]]")
PLANTS = {
    "chain": None,
    "dynamic": SHAPE,
    "static": StaticShape(CHOICES),
}


def make(length=4, *, agreement=1.0, plant="chain", **options):
    engine = FeaturedEngine(vocab_size=VOCAB, max_draft_len=63, **options)
    head = FakeEagleHead(engine, agreement, 1 if plant == "chain" else SHAPE.width)
    return engine, head, EagleDrafter(head, length, PLANTS[plant])


@pytest.mark.parametrize("reuse", [False, True])
def test_a_head_that_is_right_has_whole_chains_accepted(reuse):
    """Prompts in chunks, some of them from the cache, requests that start while others generate,
    greedy and sampled: a feature, token or position that is another's would give other drafts."""
    engine, _, drafter = make(max_num_tokens=40, max_batch_size=4)
    harness = Harness(engine, drafter, reuse=reuse)
    generator = np.random.default_rng(1)
    for index, prompt in enumerate(prompts(generator, 14, VOCAB)):
        sampled = SamplingConfig(temperature=0.9, top_k=0, seed=index)
        config = sampled if index % 3 == 2 else SamplingConfig()
        harness.add(Request(prompt, max_tokens=30, sampling_config=config))
    rounds = 0
    while harness.scheduler.has_work:
        report = harness.step()
        drafted = report.commits[len(report.batch.context) :]
        for item, commit in zip(report.batch.generation, drafted, strict=True):
            assert commit.num_drafts == min(item.draft_len, 4), "a round without its drafts"
            assert commit.accepted == commit.num_drafts
            assert len(set(commit.sequence.kv_lens)) == 1, "the head keeps up"
            rounds += 1
    assert rounds > 60


@pytest.mark.parametrize("schedule", range(4))
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("plant", PLANTS)
def test_any_schedule_gives_the_plain_answer(schedule, agreement, plant):
    """Chunks, pauses, cancels, reuse, own draft lengths, greedy and sampled requests."""
    generator = np.random.default_rng([schedule, int(10 * agreement)])
    engine, head, drafter = make(
        int(generator.integers(1, 9 if plant == "chain" else 24)),
        agreement=agreement,
        plant=plant,
        max_num_tokens=int(generator.choice([10, 17, 48])),
        max_batch_size=int(generator.choice([2, 8])),
    )
    reuse = schedule % 2 == 0
    harness = run_any_schedule(generator, engine, drafter, reuse=reuse, vocab=VOCAB)
    assert reuse or not head.num_foreign
    if agreement == 1.0:
        assert harness.loop.stats.accepted_tokens > 20


@pytest.mark.parametrize("plant", ["dynamic", "static"])
def test_trees_of_a_head_that_is_right_are_accepted_to_their_depth(plant):
    """Beside sampled requests, which draft chains with the target's noise."""
    engine, head, drafter = make(8, plant=plant, max_num_tokens=60, max_batch_size=4)
    harness = Harness(engine, drafter)
    generator = np.random.default_rng(1)
    for index, prompt in enumerate(prompts(generator, 10, VOCAB)):
        sampled = SamplingConfig(temperature=0.9, top_k=0, seed=index)
        config = sampled if index % 3 == 2 else SamplingConfig()
        harness.add(Request(prompt, max_tokens=30, sampling_config=config))
    accepted = {True: [], False: []}
    while harness.scheduler.has_work:
        report = harness.step()
        drafted = report.commits[len(report.batch.context) :]
        for item, commit in zip(report.batch.generation, drafted, strict=True):
            is_greedy = item.sequence.request.sampling_config.is_greedy
            if item.draft_len == 8:
                accepted[is_greedy].append(commit.accepted)
                assert commit.num_drafts == (8 if is_greedy else PLANTS[plant].depth)
            assert len(set(commit.sequence.kv_lens)) == 1, "the head keeps up"
    assert set(accepted[False]) == {PLANTS[plant].depth}, "chains, as deep as trees"
    if plant == "static":
        assert set(accepted[True]) == {4}, "the list's deepest path is the likeliest"
    assert min(accepted[True]) >= 2, "the head is right, and the best path is in the tree"
    assert any(count > len(PLANTS) for _, count in head.steps), "several rows of a sequence"


def test_a_prompts_pairs_are_read_chunk_by_chunk_and_drafts_token_by_token():
    engine, head, drafter = make(3, max_num_tokens=8)
    harness = Harness(engine, drafter)
    harness.add(Request(tuple(range(20)), max_tokens=12))
    for _ in range(3):
        harness.step()
    assert head.steps == [("extend", 8), ("extend", 8), ("extend", 4)]
    harness.step()
    assert head.steps[3:] == [("next", 1), ("next", 1), ("extend", 4)]


def test_a_request_that_missed_a_step_has_no_drafts_once_and_goes_on():
    engine, _, drafter = make()
    first, second = drafts_after_a_missed_step(engine, drafter)
    assert first[1] == 0 and first[2] > 0
    assert all(second.values())


def test_a_finished_text_is_continued_from_the_cache_of_both():
    """The last blocks of a text have the head's content, too, though it drafted nothing there."""
    engine, head, drafter = make()
    harness = Harness(engine, drafter)
    first = harness.add(Request((1, 2, 3), max_tokens=30))
    harness.run()
    second = harness.add(Request((*first.tokens, 7), max_tokens=9))
    harness.step()
    assert second.kv_lens == [len(first.tokens) + 1] * 2
    assert head.steps[-1] == ("extend", 2), "its last token, and what the cache did not have"
    harness.run()
    assert not head.num_foreign


def test_after_a_step_that_failed_the_others_go_on():
    engine, _, drafter = make()
    go_on_after_a_step_that_failed(engine, drafter, VOCAB)


def test_no_drafts_a_round_are_refused():
    with pytest.raises(BadConfig, match="max_draft_len is 0"):
        EagleDrafter(FakeEagleHead(FeaturedEngine()), 0)
