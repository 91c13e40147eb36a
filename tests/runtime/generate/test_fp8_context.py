"""Engines whose prompts have FP8 products: every token is computed as its position says.

The fake engine's cache has beside each token what it was computed with, on which its logits depend;
the harness compares all of it after every step, and the text with the plain answer.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.executor import collect, config

from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

VOCAB, GROUP, BLOCK = 23, 8, 4


def random_request(generator, pool):
    """A prompt that shares its beginning with others, more often than not."""
    prompt = list(pool[generator.integers(len(pool))])[: generator.integers(60)]
    prompt += generator.integers(0, VOCAB, generator.integers(1, 30)).tolist()
    params = SamplingConfig(temperature=0.8, top_k=0, seed=int(generator.integers(2**60)))
    return Request(tuple(prompt), int(generator.integers(1, 30)), params)


def random_harness(fake, kind, generator):
    policy = generator.choice(list(CapacitySchedulerPolicy))
    is_small = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    is_chunked = bool(generator.random() < 0.8)
    config = SchedulerConfig(policy, generator.choice(list(ContextChunkingPolicy)), is_chunked)
    sizes = [GROUP, 13, 25, 96] if is_chunked else [128]
    host = int(generator.choice([0, 0, 12]))
    target = fake.Engine(
        max_seq_len=128,
        max_num_tokens=int(generator.choice(sizes)),
        max_batch_size=int(generator.choice([2, 8])),
        context_group=GROUP,
        steps_to_land=None if not host else 2,
    )
    drafter = draft = None
    if kind == "ngram":
        drafter = NgramDrafter(4, max_ngram=2)
    elif kind.startswith("draft"):
        draft = fake.Engine(
            agreement=0.8,
            max_seq_len=128,
            max_num_tokens=int(generator.choice([48, 11])),
            context_group=GROUP if kind == "draft with" else 0,
        )
        drafter = DraftEngineDrafter(draft, 3)
    return fake.Harness(
        target,
        drafter,
        draft=draft,
        num_blocks=36 if is_small else 200,
        num_host_blocks=host,
        config=config,
        on_device=kind == "rounds",
    )


@pytest.mark.parametrize("kind", ["none", "ngram", "draft with", "draft without", "rounds"])
@pytest.mark.parametrize("schedule", range(8))
def test_any_schedule_gives_the_plain_answer(fake, kind, schedule):
    generator = np.random.default_rng([schedule, len(kind)])
    harness = random_harness(fake, kind, generator)
    pool = [generator.integers(0, VOCAB, 60).tolist() for _ in range(2)]
    requests = [random_request(generator, pool) for _ in range(14)]
    harness.run_arriving(generator, requests, horizon=60)
    assert harness.target.num_fp8 > 50


def test_the_random_schedules_reach_pauses_and_reuse_of_both_kinds(fake):
    paused = reused = 0
    kinds = set()
    for schedule in range(8):
        generator = np.random.default_rng([schedule, 4])
        harness = random_harness(fake, "none", generator)
        pool = [generator.integers(0, VOCAB, 60).tolist()]
        for _ in range(14):
            harness.add(random_request(generator, pool))
        harness.run()
        paused += harness.scheduler.num_paused
        reused += harness.kv_cache.stats().reused_blocks
        kinds |= {node.key.is_fp8 for node in harness.kv_cache._store.tree.nodes()}
    assert paused > 3 and reused > 20 and kinds == {True, False}


def test_the_harness_sees_a_block_that_was_computed_otherwise(fake, monkeypatch):
    """A cache that does not tell the kinds apart, as a mistake would make it."""
    from llmctl.runtime.kv_cache import radix_tree

    class Key(radix_tree.Key):
        def __new__(cls, tokens, is_fp8=False):
            return super().__new__(cls, tokens, False)

    for module in ("radix_tree", "manager", "audit"):
        monkeypatch.setattr(f"llmctl.runtime.kv_cache.{module}.Key", Key)
    harness = fake.Harness(fake.Engine(max_seq_len=128, max_num_tokens=96, context_group=GROUP))
    prompt = tuple(np.random.default_rng(3).integers(0, VOCAB, 48).tolist())
    harness.add(Request(prompt, 2))
    harness.run()
    harness.add(Request(prompt[:16], 20))
    with pytest.raises(AssertionError):
        harness.run()


@pytest.mark.parametrize("num_tokens", [GROUP, 20, 33, 96])
def test_the_executor_gives_sequences_their_end(fake, num_tokens):
    """Whatever steps have room for; the outputs share the prompt."""
    target = fake.Engine(max_seq_len=128, max_num_tokens=num_tokens, context_group=GROUP)
    prompt = tuple(np.random.default_rng(5).integers(0, VOCAB, 41).tolist())
    params = SamplingConfig(temperature=0.8, top_k=0, seed=3, num_return_sequences=3)
    request = Request(prompt, 20, params)
    with Executor(target, None, config(), ReferenceSampling()) as executor:
        found = collect(executor, executor.enqueue_request(request))
    texts = {each.result.sequence_index: each.result.output_token_ids for each in found}
    wanted = [tuple(fake.plain_answer(target, request, index)[0]) for index in range(3)]
    assert [texts[index] for index in range(3)] == wanted
    assert target.num_fp8 == 40, "computed once"
