"""Trees from a recurrent head: where a round starts, the room of each request, exact text."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_heads import HeadedEngine
from support.fake_loop import Harness
from support.fake_recurrent import FakeCompiledSearch, FakeRecurrentHead
from support.head_schedules import (
    drafts_after_a_missed_step,
    go_on_after_a_step_that_failed,
    prompts,
    run_any_schedule,
)

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.redrafter.drafter import BeamShape, ReDrafter
from llmctl.runtime.drafting.redrafter.search import CompiledSearch, StepSearch
from llmctl.runtime.request import Request, SamplingConfig

VOCAB = 23


def make(
    beams=3, length=4, *, agreement=1.0, for_greedy=False, draft_len=None, ahead=None, **options
):
    """ahead: makes a compiled search of the head, part of which is begun when a step ends."""
    engine = HeadedEngine(vocab_size=VOCAB, max_draft_len=63, **options)
    head = FakeRecurrentHead(engine, agreement)
    shape = BeamShape(beams, length, for_greedy)
    searcher = StepSearch(head) if ahead is None else CompiledSearch(ahead(head))
    return engine, head, ReDrafter(searcher, shape, draft_len or shape.num_drafts)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_head_that_is_right_has_a_whole_beam_accepted(reuse):
    """One beam follows the greedy path; prompts in chunks, some of them from the cache, requests
    that start while others generate: a row or a root that is another's would give other tokens."""
    engine, _, drafter = make(1, 4, max_num_tokens=40, max_batch_size=4)
    harness = Harness(engine, drafter, reuse=reuse)
    generator = np.random.default_rng(1)
    for prompt in prompts(generator, 14, VOCAB):
        harness.add(Request(prompt, max_tokens=30))
    rounds = 0
    while harness.scheduler.has_work:
        report = harness.step()
        drafted = report.commits[len(report.batch.context) :]
        for item, commit in zip(report.batch.generation, drafted, strict=True):
            assert commit.num_drafts == min(item.draft_len, 4), "a round without its drafts"
            assert commit.accepted == commit.num_drafts or commit.sequence.is_finished
            rounds += 1
    assert rounds > 60


def test_the_first_round_after_a_prompt_has_drafts():
    engine, head, drafter = make(max_num_tokens=8)
    harness = Harness(engine, drafter)
    harness.add(Request(tuple(range(20)), max_tokens=12))
    reports = []
    for _ in range(3):
        reports.append(harness.step())
        assert head.rows_of_runs == [], "not between the chunks of a prompt"
    reports.append(harness.step())
    assert [len(report.batch.context) for report in reports] == [1, 1, 1, 0]
    assert head.rows_of_runs == [1, 3, 3, 3], "one beam first, then all"
    assert reports[3].commits[0].num_drafts == 7, "as many as a step of 8 tokens holds"


@pytest.mark.parametrize("schedule", range(8))
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("ahead", [None, FakeCompiledSearch])
def test_any_schedule_gives_the_plain_answer(schedule, agreement, ahead):
    """Chunks, pauses, cancels, reuse, own draft lengths, greedy and sampled requests."""
    generator = np.random.default_rng([schedule, int(10 * agreement)])
    engine, _, drafter = make(
        int(generator.integers(1, 6)),
        int(generator.integers(1, 6)),
        agreement=agreement,
        ahead=ahead,
        for_greedy=bool(generator.integers(2)),
        draft_len=int(generator.integers(1, 12)),
        max_num_tokens=int(generator.choice([10, 17, 48])),
        max_batch_size=int(generator.choice([2, 8])),
    )
    harness = run_any_schedule(generator, engine, drafter, reuse=schedule % 2 == 0, vocab=VOCAB)
    if agreement == 1.0:
        assert harness.loop.stats.accepted_tokens > 20


def test_the_search_for_a_step_like_the_last_one_begins_when_that_ends():
    """In steps without prompts, for requests that go on; what is found is the same."""
    found = []
    for ahead in (None, FakeCompiledSearch):
        engine, _, drafter = make(2, 3, agreement=0.7, ahead=ahead, max_batch_size=4)
        harness = Harness(engine, drafter)
        for start in range(3):
            harness.add(Request((1, 2, start), max_tokens=60 + start))
        harness.run()
        found.append(harness.loop.stats.histogram)
    compiled = drafter._searcher._compiled
    assert compiled.num_begun > 2 * compiled.num_run, "no thread had time for one in five"
    assert found[0] == found[1]


def test_each_request_has_beams_of_the_length_that_it_has_room_for():
    engine, head, drafter = make(3, 4)
    harness = Harness(engine, drafter)
    for most in (2, 0, None, 1):
        harness.add(Request((1, 2, 3), max_tokens=40, max_draft_len=most))
    harness.step()
    commits = harness.step().commits
    assert head.rows_of_runs == [3, 6, 3, 3], "of all, of two, of one"
    drafts = [commit.num_drafts for commit in commits]
    assert drafts[0] == 2 and drafts[1] == 0 and 4 < drafts[2] <= 12 and drafts[3] == 1
    # The best beam comes first, and of one that is cut the beginning.
    assert [commit.accepted for commit in commits][1] == 0


def test_sampled_requests_draft_only_where_the_search_is_for_them():
    for for_greedy, wanted in ((False, [True, True]), (True, [True, False])):
        engine, _, drafter = make(for_greedy=for_greedy)
        harness = Harness(engine, drafter)
        harness.add(Request((1, 2, 3), max_tokens=20))
        sampled = SamplingConfig(temperature=0.9, top_k=0, seed=3)
        harness.add(Request((1, 2, 4), max_tokens=20, sampling_config=sampled))
        harness.step()
        assert [commit.num_drafts > 0 for commit in harness.step().commits] == wanted
        harness.run()


def test_a_request_that_missed_a_step_has_no_drafts_once_and_goes_on():
    engine, _, drafter = make()
    first, second = drafts_after_a_missed_step(engine, drafter)
    assert first[1] == 0 and first[2] > 0
    assert all(second.values())


def test_after_a_step_that_failed_the_others_go_on():
    engine, _, drafter = make()
    go_on_after_a_step_that_failed(engine, drafter, VOCAB)


def test_one_beam_is_drafted_as_a_chain():
    """Its steps need no tree of the engine."""
    engine, _, drafter = make(1, 5)
    engine.takes_trees = False
    harness = Harness(engine, drafter)
    harness.add(Request((1, 2, 3), max_tokens=30))
    harness.run()
    assert harness.loop.stats.accepted_tokens > 15


def test_trees_say_how_many_drafts_a_chain_would_have_had():
    engine, _, drafter = make(3, 4)
    harness = Harness(engine, drafter)
    harness.add(Request((1, 2, 3), max_tokens=30))
    found = set()
    while harness.scheduler.has_work:
        harness.loop.step()
        found.add(drafter.confidence.num_first)
    assert 4 in found and max(found) == 4, "those of the best beam"


def test_no_drafts_a_round_are_refused():
    with pytest.raises(BadConfig, match="max_draft_len is 0"):
        ReDrafter(StepSearch(FakeRecurrentHead(HeadedEngine())), BeamShape(2, 2), 0)
