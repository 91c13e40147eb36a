"""Random schedules for drafters that have a state of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmctl.errors import BadLogits
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.schedule.chunked_prefill import ContextChunkingPolicy
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig
from support.fake_engine import plain_answer
from support.fake_loop import Harness


def prompts(generator: np.random.Generator, count: int, vocab: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to 42 tokens; some begin with the same 13."""
    shared = generator.integers(0, vocab, 13).tolist()
    return [
        (*(shared if generator.random() < 0.4 else []), *generator.integers(0, vocab, n).tolist())
        for n in generator.integers(1, 30, count)
    ]


def run_any_schedule(
    generator: np.random.Generator,
    engine: Any,
    drafter: Any,
    *,
    reuse: bool,
    vocab: int,
    draft: Any = None,
) -> Harness:
    """Twelve requests of every kind arrive under a policy drawn at random, and are checked as the
    harness does; it has ended."""
    policy = generator.choice(list(CapacitySchedulerPolicy))
    config = SchedulerConfig(policy, generator.choice(list(ContextChunkingPolicy)), True)
    small = policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    num_blocks = 32 if small else 200
    harness = Harness(
        engine, drafter, draft=draft, num_blocks=num_blocks, reuse=reuse, config=config
    )
    requests = [
        Request(
            prompt,
            max_tokens=int(generator.integers(1, 40)),
            sampling_config=SamplingConfig(
                temperature=0.8, top_k=0, seed=int(generator.integers(99))
            )
            if generator.random() < 0.4
            else SamplingConfig(),
            end_id=5 if generator.random() < 0.4 else None,
            max_draft_len=int(generator.integers(0, 9)) if generator.random() < 0.4 else None,
        )
        for prompt in prompts(generator, 12, vocab)
    ]
    harness.run_arriving(generator, requests, horizon=60)
    return harness


def drafts_after_a_missed_step(engine: Any, drafter: Any) -> list[dict[int, int]]:
    """Drafts by request in the two steps behind one that request 1 of two missed."""
    harness = Harness(engine, drafter)
    late = harness.add(Request((1, 2, 3), max_tokens=40))
    harness.add(Request((4, 5, 6), max_tokens=40))
    harness.step()
    held = harness.scheduler._active.pop(late.sequence_id)
    harness.step()
    harness.scheduler._active[late.sequence_id] = held
    return [
        {
            item.sequence.sequence_id: commit.num_drafts
            for item, commit in zip(report.batch.slices, report.commits, strict=True)
        }
        for report in (harness.step(), harness.step())
    ]


def go_on_after_a_step_that_failed(engine: Any, drafter: Any, vocab: int) -> None:
    """One request is cancelled for it; others run to their ends, checked as the harness does. So do
    those beside one that fails alone."""
    harness = Harness(engine, drafter)
    victim = harness.add(Request((1, 2, 3), max_tokens=30))
    harness.step()
    engine.fail_at = engine.num_runs + 1
    with pytest.raises(RuntimeError, match="the engine broke"):
        harness.step()
    harness.cancel(victim)
    generator = np.random.default_rng(3)
    requests = [Request(prompt, max_tokens=20) for prompt in prompts(generator, 5, vocab)]
    harness.run_arriving(generator, requests, horizon=10)
    _go_on_beside_one_that_fails(harness, engine, vocab)


def _go_on_beside_one_that_fails(harness: Harness, engine: Any, vocab: int) -> None:
    """Its logits are no numbers from its twelfth token on."""
    whole = engine.logits

    def logits(tokens: Any) -> Any:
        is_bad = list(tokens[:3]) == [1, 2, 3] and len(tokens) >= 12
        return whole(tokens) * np.float32("nan" if is_bad else 1)

    victim = harness.add(Request((1, 2, 3), max_tokens=30))
    generator = np.random.default_rng(4)
    others = [harness.add(Request(each, max_tokens=20)) for each in prompts(generator, 3, vocab)]
    engine.logits = logits
    harness.run()
    engine.logits = whole
    assert isinstance(victim.error, BadLogits) and len(victim.tokens) <= 12
    for sequence in others:
        wanted = plain_answer(engine, sequence.request)[0]
        assert sequence.tokens[sequence.num_prompt_tokens :] == wanted
