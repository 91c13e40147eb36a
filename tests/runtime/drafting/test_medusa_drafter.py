"""Trees filled from heads: the row that the heads read, the room of each request, exact text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.fake_heads import FakeHeads, HeadedEngine
from support.fake_loop import Harness
from support.head_schedules import (
    drafts_after_a_missed_step,
    go_on_after_a_step_that_failed,
    prompts,
    run_any_schedule,
)

from llmctl.builder.heads.medusa.tree import DEFAULT, MedusaTree
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.medusa.drafter import MedusaDrafter
from llmctl.runtime.request import Request

VOCAB = 23
TREE = MedusaTree.of([(0, 1), (1, 0), (0, 0, 0), (2,), (1, 2, 0), (0, 2)])


def make(tree=TREE, *, right_rank=0, agreement=1.0, draft_len=None, **options):
    engine = HeadedEngine(vocab_size=VOCAB, max_draft_len=63, **options)
    heads = FakeHeads(engine, tree.depth, right_rank, agreement)
    return engine, heads, MedusaDrafter(heads, tree, draft_len or tree.num_nodes)


@pytest.mark.parametrize("right_rank", [0, 1, 2])
@pytest.mark.parametrize("reuse", [False, True])
def test_heads_that_are_right_have_every_draft_on_their_path_accepted(right_rank, reuse):
    """Prompts in chunks, some of them from the cache, requests that start while others generate: a
    row that is another's, or of a draft that was not accepted, would give other tokens."""
    path = (right_rank,) * 3
    tree = MedusaTree.of([(0,), (1,), (2,), (0, 1), path, (2, 1)])
    engine, _, drafter = make(tree, right_rank=right_rank, max_num_tokens=40, max_batch_size=4)
    harness = Harness(engine, drafter, reuse=reuse)
    generator = np.random.default_rng(right_rank)
    for prompt in prompts(generator, 14, VOCAB):
        harness.add(Request(prompt, max_tokens=30))
    seen = Counter()
    while harness.scheduler.has_work:
        report = harness.step()
        drafted = report.commits[len(report.batch.context) :]
        for item, commit in zip(report.batch.generation, drafted, strict=True):
            if commit.num_drafts == tree.num_nodes:
                seen[commit.accepted] += 1
            assert commit.num_drafts == item.draft_len, "a round without its drafts"
    assert set(seen) == {3} and seen[3] > 20


def test_the_first_round_after_a_prompt_has_drafts():
    engine, heads, drafter = make(max_num_tokens=8)
    harness = Harness(engine, drafter)
    harness.add(Request(tuple(range(20)), max_tokens=12))
    reports = [harness.step() for _ in range(4)]
    assert [len(report.batch.context) for report in reports] == [1, 1, 1, 0]
    assert heads.num_runs == 1, "not between the chunks of a prompt"
    assert reports[3].commits[0].num_drafts == 7, "as many as a step of 8 tokens holds"
    assert reports[3].commits[0].accepted == 3


@pytest.mark.parametrize("schedule", range(6))
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_any_schedule_gives_the_plain_answer(schedule, agreement):
    """Chunks, pauses, cancels, reuse, own draft lengths, greedy and sampled requests."""
    generator = np.random.default_rng([schedule, int(10 * agreement)])
    engine, _, drafter = make(
        MedusaTree(DEFAULT) if schedule % 3 == 0 else TREE,
        right_rank=0 if agreement == 1.0 else int(generator.integers(3)),
        agreement=agreement,
        draft_len=int(generator.integers(6 if agreement == 1.0 else 1, 12)),
        max_num_tokens=int(generator.choice([10, 17, 48])),
        max_batch_size=int(generator.choice([2, 8])),
    )
    harness = run_any_schedule(generator, engine, drafter, reuse=schedule % 2 == 0, vocab=VOCAB)
    if agreement == 1.0:
        assert harness.loop.stats.accepted_tokens > 20


def test_a_request_with_less_room_gets_the_first_nodes():
    engine, _, drafter = make()
    harness = Harness(engine, drafter)
    harness.add(Request((1, 2, 3), max_tokens=40, max_draft_len=3))
    harness.add(Request((1, 2, 4), max_tokens=40, max_draft_len=0))
    harness.add(Request((1, 2, 5), max_tokens=40))
    harness.step()
    commits = harness.step().commits
    assert [commit.num_drafts for commit in commits] == [3, 0, TREE.num_nodes]
    # Of [0], [0, 1], [1]: head 0 alone is right at rank 0.
    assert [commit.accepted for commit in commits] == [1, 0, 3]


def test_a_request_that_missed_a_step_has_no_drafts_once_and_goes_on():
    """Both of these sequences stay; one of them is left out of a step, as one that waits for its
    blocks is."""
    engine, heads, drafter = make()
    first, second = drafts_after_a_missed_step(engine, drafter)
    assert first == {1: 0, 2: TREE.num_nodes}
    assert second == {1: TREE.num_nodes, 2: TREE.num_nodes}


def test_after_a_step_that_failed_the_others_go_on():
    engine, _, drafter = make()
    go_on_after_a_step_that_failed(engine, drafter, VOCAB)


def test_a_chain_is_drafted_as_one():
    """Its steps need no tree of the engine."""
    engine, _, drafter = make(MedusaTree.of([(0, 0, 0)]))
    engine.takes_trees = False
    harness = Harness(engine, drafter)
    harness.add(Request((1, 2, 3), max_tokens=30))
    harness.run()
    assert harness.loop.stats.accepted_tokens > 15


def test_no_drafts_a_round_are_refused():
    with pytest.raises(BadConfig, match="max_draft_len is 0"):
        MedusaDrafter(FakeHeads(HeadedEngine(), 3), TREE, 0)
