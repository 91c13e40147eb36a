"""With a draft or without, alone or in company, whole or in chunks: the same tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from support.tree_drafter import TreeDrafter

from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

VOCAB = 23


def random_request(generator: np.random.Generator, pool: list[list[int]]) -> Request:
    """Any mix of features; prompts often share a prefix from `pool`."""
    prompt = list(pool[generator.integers(len(pool))]) if generator.random() < 0.6 else []
    prompt += generator.integers(0, VOCAB, generator.integers(1, 40)).tolist()
    style = generator.integers(4)
    common = {"seed": int(generator.integers(2**63)), "min_tokens": int(generator.integers(4))}
    common["no_repeat_ngram_size"] = int(generator.choice([0, 0, 0, 2, 3]))
    if style == 0:
        config = SamplingConfig(**common)
    elif style == 1:
        config = SamplingConfig(temperature=0.7, top_k=0, **common)
    elif style == 2:
        config = SamplingConfig(
            temperature=1.3, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.2, **common
        )
    else:
        config = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.3, **common)
    words = [tuple(generator.integers(0, VOCAB, n).tolist()) for n in (1, 2, 3, 2)]
    return Request(
        input_token_ids=tuple(prompt),
        max_tokens=max(int(generator.integers(1, 40)), config.min_tokens),
        sampling_config=config,
        output_config=OutputConfig(return_log_probs=bool(generator.random() < 0.3)),
        end_id=int(generator.integers(VOCAB)) if generator.random() < 0.5 else None,
        further_end_ids=(int(generator.integers(VOCAB)),) if generator.random() < 0.2 else (),
        stop_words=tuple(words[1:3]) if generator.random() < 0.4 else (),
        bad_words=(words[0], words[3]) if generator.random() < 0.4 else (),
    )


def make_drafter(fake, name: str, generator: np.random.Generator, target):
    """(drafter, draft engine or None)."""
    draft_len = int(generator.integers(1, 7))
    if name == "trees":
        answer = lru_cache(lambda request, index: fake.plain_answer(target, request, index)[0])
        drafter = TreeDrafter(
            draft_len + 2,
            lambda sequence: answer(sequence.request, sequence.index),
            VOCAB,
            draft_len,
        )
        return drafter, None
    if name == "none":
        return None, None
    if name == "ngram":
        return NgramDrafter(draft_len, max_ngram=int(generator.integers(1, 4))), None
    draft = fake.Engine(
        agreement={"perfect": 1.0, "good": 0.8, "random": 0.0}[name],
        max_seq_len=int(generator.choice([96, 96, 50])),
        max_batch_size=int(generator.choice([8, 3])),
        max_num_tokens=int(generator.choice([48, 7])),
        extra_vocab=int(generator.choice([0, 3])),
    )
    return DraftEngineDrafter(draft, draft_len), draft


def random_harness(fake, name: str, generator: np.random.Generator):
    """Any policy, any chunk budget, a cache that is roomy or so small that sequences pause."""
    policies = list(CapacitySchedulerPolicy)
    policy = generator.choice([*policies, CapacitySchedulerPolicy.MAX_UTILIZATION])
    small = policy is CapacitySchedulerPolicy.MAX_UTILIZATION and generator.random() < 0.8
    config = SchedulerConfig(policy, generator.choice(list(ContextChunkingPolicy)), True)
    target = fake.Engine(
        max_num_tokens=int(generator.choice([10, 17, 48])),
        max_batch_size=int(generator.choice([2, 8])),
    )
    drafter, draft = make_drafter(fake, name, generator, target)
    return fake.Harness(
        target,
        drafter,
        draft=draft,
        num_blocks=26 if small else 200,
        reuse=bool(generator.random() < 0.7),
        config=config,
    )


@pytest.mark.parametrize("name", ["none", "ngram", "perfect", "good", "random", "trees"])
@pytest.mark.parametrize("schedule", range(12))
def test_any_schedule_with_any_drafter_gives_the_plain_answer(fake, name, schedule):
    generator = np.random.default_rng([schedule, len(name)])
    harness = random_harness(fake, name, generator)
    pool = [generator.integers(0, VOCAB, n).tolist() for n in (5, 13, 24)]
    requests = [random_request(generator, pool) for _ in range(12)]
    harness.run_arriving(generator, requests, horizon=60)


def test_the_random_schedules_reach_pauses_reuse_and_acceptance(fake):
    """The generator above is only worth something if it gets to the hard places."""
    num_paused = reused = accepted = truncated = 0
    for schedule in range(12):
        generator = np.random.default_rng([99, schedule])
        harness = random_harness(fake, "good", generator)
        pool = [generator.integers(0, VOCAB, 24).tolist()]
        for _ in range(12):
            harness.add(random_request(generator, pool))
        while harness.scheduler.has_work:
            for commit in harness.step().commits:
                truncated += commit.num_tokens < commit.accepted + 1 and commit.num_drafts > 0
        num_paused += harness.scheduler.num_paused
        reused += harness.kv_cache.stats().reused_blocks
        accepted += harness.loop.stats.accepted_tokens
    assert num_paused > 3 and reused > 20 and accepted > 100 and truncated > 3


def test_accepted_paths_of_trees_move_in_the_cache(fake):
    """The harness audits the cache after every step; here that there is something to audit."""
    moved = requests_with_moves = stopped = 0
    for schedule in range(6):
        generator = np.random.default_rng([7, schedule])
        harness = random_harness(fake, "trees", generator)
        pool = [generator.integers(0, VOCAB, 24).tolist()]
        for _ in range(12):
            harness.add(random_request(generator, pool))
        while harness.scheduler.has_work:
            commits = harness.step().commits
            moved += sum(len(commit.moves) for commit in commits)
            requests_with_moves = max(requests_with_moves, sum(bool(c.moves) for c in commits))
            stopped += sum(c.num_tokens < c.accepted + 1 and bool(c.moves) for c in commits)
        assert harness.drafter.num_trees > 20
    assert moved > 100 and requests_with_moves > 1 and stopped > 0


def test_a_cache_that_is_not_compacted_is_noticed(fake, monkeypatch):
    monkeypatch.setattr(fake.Engine, "compact", lambda self, moves: None)
    generator = np.random.default_rng(7)
    harness = random_harness(fake, "trees", generator)
    harness.add(random_request(generator, [[1, 2, 3]]))
    with pytest.raises(AssertionError):
        for _ in range(20):
            harness.add(random_request(generator, [[1, 2, 3]]))
            harness.run()
