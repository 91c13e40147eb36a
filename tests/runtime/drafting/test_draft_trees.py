"""Trees from a draft engine: its cache, which tokens it computes, exact text."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.fake_loop import Harness
from support.head_schedules import (
    go_on_after_a_step_that_failed,
    prompts,
    run_any_schedule,
)

from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafts import ROOT
from llmctl.runtime.drafting.growth.growth import DynamicShape
from llmctl.runtime.request import Request, SamplingConfig

VOCAB = 23
PROMPT = (3, 1, 4, 1, 5)


class Draft(FakeEngine):
    """Keeps the steps, too, and how far keys were moved."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.steps: list[tuple[int, ...]] = []  # tokens of each request
        self.num_moves = 0

    def run(self, step):
        self.steps.append(tuple(np.diff(step.cu_q).tolist()))
        return super().run(step)

    def compact(self, moves) -> None:
        for own in moves:
            self.num_moves += len(own)
            for index, (_, target) in enumerate(own):
                assert target not in [source for source, _ in own[index + 1 :]]
        super().compact(moves)


def make(tree=(4, 3, 12), *, agreement=1.0, target=None, **draft_size):
    depth, branch, nodes = tree
    engine = FakeEngine(max_draft_len=63, **(target or {}))
    draft = Draft(agreement=agreement, **draft_size)
    drafter = DraftEngineDrafter(draft, nodes, DynamicShape(branch, branch, depth))
    return engine, draft, drafter


def likeliest(engine, tokens, tree):
    """The paths of a tree by a search over all that the engine could be asked."""
    depth, branch, nodes = tree
    pool, level = [], [((), 0.0)]
    for _ in range(depth):
        fresh = []
        for path, score in level:
            row = engine.logits(np.array([*tokens, *path])).astype(np.float64)
            logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            best = np.argsort(-logs, kind="stable")[:branch]
            fresh += [((*path, int(token)), score + logs[token]) for token in best]
        pool += fresh
        level = sorted(fresh, key=lambda entry: -entry[1])[:branch]
    return {path for path, _ in sorted(pool, key=lambda entry: -entry[1])[:nodes]}


@pytest.mark.parametrize("tree", [(1, 4, 4), (3, 2, 6), (4, 3, 12), (6, 4, 9), (2, 5, 30)])
@pytest.mark.parametrize("agreement", [0.5, 1.0])
def test_drafts_are_the_likeliest_paths_of_the_draft_engine(tree, agreement):
    """In every round, whatever was accepted before: a key at another's place would show."""
    target = {"max_num_tokens": 128, "max_seq_len": 128}
    size = {"max_seq_len": 128, "max_draft_len": 29, "max_num_tokens": 128}
    engine, draft, drafter = make(tree, agreement=agreement, target=target, **size)
    found = []
    propose = drafter.propose

    def kept(batch):
        drafts = propose(batch)
        for item, own in zip(batch.generation, drafts, strict=True):
            found.append((list(item.sequence.tokens), item.draft_len, own))
        return drafts

    drafter.propose = kept
    harness = Harness(engine, drafter, draft=draft)
    sequences = [harness.add(Request((i, *PROMPT), 70)) for i in range(3)]
    harness.run()
    for sequence in sequences:
        assert len(sequence.tokens) == 6 + 70
    num_whole = 0
    for tokens, room, own in found:
        if room < tree[2]:  # at the end of a text
            continue
        num_whole += 1
        paths = {tuple(own.tokens_to(index)) for index in range(len(own.tokens))}
        assert paths == likeliest(draft, tokens, tree)
    assert num_whole > 20
    if agreement < 1 and tree[0] > 1:
        assert draft.num_moves, "an accepted path was not the likeliest"


@pytest.mark.parametrize("schedule", range(6))
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_any_schedule_gives_the_plain_answer(schedule, agreement):
    """Chunks, pauses, cancels, reuse, own draft lengths, greedy and sampled requests, and a draft
    engine that takes fewer of them at once."""
    generator = np.random.default_rng([schedule, int(10 * agreement)])
    depth, branch = int(generator.integers(1, 6)), int(generator.integers(1, 5))
    most = branch + (depth - 1) * branch**2
    nodes = int(generator.integers(depth, max(depth, most) + 1))
    limits = {
        "max_num_tokens": int(generator.choice([10, 17, 48])),
        "max_batch_size": int(generator.choice([2, 8])),
    }
    engine, draft, drafter = make(
        (depth, branch, nodes),
        agreement=agreement,
        target=limits,
        max_batch_size=int(generator.choice([1, 3, 8])),
        max_num_tokens=int(generator.choice([4, 9, 48])),
        max_draft_len=int(generator.choice([3, 8])),
        max_seq_len=int(generator.choice([40, 96])),
        vocab_size=VOCAB,
        extra_vocab=int(generator.choice([0, 3])),
    )
    harness = run_any_schedule(
        generator, engine, drafter, reuse=schedule % 2 == 0, vocab=VOCAB, draft=draft
    )
    if agreement == 1.0:
        assert harness.loop.stats.accepted_tokens > 20


def test_what_was_accepted_is_not_computed_again_but_the_last_draft():
    """A draft engine that is right: a path of four, of which the last has no key."""
    engine, draft, drafter = make((4, 2, 8))
    harness = Harness(engine, drafter, draft=draft)
    sequence = harness.add(Request(PROMPT, 60))
    harness.step()
    before = 0
    for _ in range(6):
        draft.steps.clear()
        commits = harness.step().commits
        (first, *levels) = draft.steps
        assert first == (1 + before,), "the root, and a last draft that none followed"
        assert all(count <= (2,) for count in levels) and len(levels) <= 3
        before = len(sequence.tokens) - 1 - sequence.kv_lens[DRAFT_GROUP]
        assert before in (0, 1) and (before or commits[0].accepted < 4)
    assert harness.loop.stats.accepted_tokens >= 18


def test_a_level_of_all_requests_is_one_step():
    engine, draft, drafter = make((3, 3, 9))
    harness = Harness(engine, drafter, draft=draft)
    for index in range(5):
        harness.add(Request((index, *PROMPT), 30))
    harness.step()
    draft.steps.clear()
    harness.step()
    assert len(draft.steps) == 3 and all(len(counts) == 5 for counts in draft.steps)
    assert max(max(counts) for counts in draft.steps[1:]) == 3


def test_requests_that_are_not_greedy_draft_chains_with_the_targets_noise():
    engine, draft, drafter = make((5, 3, 12))
    harness = Harness(engine, drafter, draft=draft)
    config = SamplingConfig(temperature=1.5, top_k=0, seed=11, repetition_penalty=1.1)
    harness.add(Request(PROMPT, 61, config))
    harness.step()
    for _ in range(8):
        (commit,) = harness.step().commits
        assert (commit.num_drafts, commit.accepted) == (5, 5)


def test_siblings_differ_and_parents_come_first():
    engine, _, drafter = make((4, 3, 12))
    harness = Harness(engine, drafter)
    harness.add(Request(PROMPT, 60))
    harness.step()
    (own,) = drafter.propose(harness.scheduler.schedule())
    assert own.parents is not None and len(own.tokens) == 12 and own.depth <= 4
    children = sorted(zip(own.parents, own.tokens, strict=True))
    assert all(a != b for a, b in pairwise(children))
    assert own.parents[0] == ROOT


def test_drafting_stops_at_the_drafts_own_length_limit_and_generation_goes_on():
    engine, draft, drafter = make((4, 3, 12), max_seq_len=24)
    harness = Harness(engine, drafter, draft=draft)
    sequence = harness.add(Request(PROMPT, 60))
    drafts = []
    while harness.scheduler.has_work:
        length = len(sequence.tokens)
        drafts.append((length, harness.step().commits[0].num_drafts))
    assert any(0 < count < 12 for _, count in drafts)
    assert all(count == 0 for length, count in drafts if length > 24)
    assert len(sequence.tokens) == 65


def test_a_reused_prompt_is_valid_in_the_drafts_cache():
    """Its tokens were an accepted path, whose keys were moved."""
    engine, draft, drafter = make()
    harness = Harness(engine, drafter, draft=draft)
    first = harness.add(Request(PROMPT, 40))
    harness.run()
    assert draft.num_moves
    draft.num_tokens.clear()
    second = harness.add(Request((*first.tokens, 7), 20))
    harness.step()
    assert draft.num_tokens[0] <= 6, "the rest is in the cache"
    assert second.kv_lens[DRAFT_GROUP] == len(first.tokens) + 1
    harness.run()


def test_after_a_step_that_failed_the_others_go_on():
    engine, _, drafter = make()
    go_on_after_a_step_that_failed(engine, drafter, VOCAB)


def test_many_prompts_at_once_are_answered_as_alone():
    engine, draft, drafter = make((3, 2, 6), max_batch_size=3, max_num_tokens=7, max_draft_len=1)
    harness = Harness(engine, drafter, draft=draft)
    generator = np.random.default_rng(5)
    requests = [Request(prompt, 20) for prompt in prompts(generator, 9, VOCAB)]
    harness.run_arriving(generator, requests, horizon=4)
    assert max(draft.num_tokens) <= 7
    assert max(map(len, draft.steps)) <= 3
