"""Requests of which some have logits that are no numbers, under schedules drawn at random: those
fail, and all others have the plain answer."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.errors import BadLogits
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.growth.growth import DynamicShape
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig

VOCAB = 23
BEGINNING = (22,) * 13  # of half of the prompts, so that they share blocks


def engine_class(fake, failing: dict[int, int]):
    """failing: by the token behind the beginning, from how many tokens on logits are NaN."""

    class Broken(fake.Engine):
        def logits(self, tokens):
            row = super().logits(tokens)
            prompt = list(tokens[13:] if tuple(tokens[:13]) == BEGINNING else tokens)
            is_bad = prompt and len(tokens) >= failing.get(prompt[0], 1 << 30)
            return row * np.float32("nan" if is_bad else 1)

    return Broken


@pytest.mark.parametrize("method", ["plain", "ngram", "chain", "tree", "device", "device chain"])
@pytest.mark.parametrize("seed", range(6))
def test_those_beside_it_have_the_plain_answer(fake, method, seed):
    generator = np.random.default_rng(seed)
    failing: dict[int, int] = {}
    requests = []
    for first in range(12):
        beginning = BEGINNING if generator.random() < 0.5 else ()
        rest = generator.integers(0, VOCAB, generator.integers(1, 20)).tolist()
        config = SamplingConfig(top_k=0, seed=seed) if first % 3 == 2 else SamplingConfig()
        requests.append(Request((*beginning, first, *rest), int(generator.integers(1, 40)), config))
        if first % 3 == 0:
            failing[first] = len(requests[-1].input_token_ids) + int(generator.integers(20))
    draft, drafter = None, NgramDrafter(3, 2) if method == "ngram" else None
    if "chain" in method or method == "tree":
        shape = DynamicShape(num_offers=2, width=2, depth=3) if method == "tree" else None
        draft = fake.Engine(agreement=0.8)
        drafter = DraftEngineDrafter(draft, 6 if shape else 3, shape)
    is_small = seed % 2 == 1
    policy = CapacitySchedulerPolicy.MAX_UTILIZATION
    harness = fake.Harness(
        engine_class(fake, failing)(max_batch_size=4, max_num_tokens=40),
        drafter,
        draft=draft,
        num_blocks=32 if is_small else 200,
        config=SchedulerConfig(policy) if is_small else None,
        on_device="device" in method,
    )
    sequences = []
    while len(sequences) < len(requests) or harness.scheduler.has_work:
        if len(sequences) < len(requests):
            sequences.append(harness.add(requests[len(sequences)]))
        for failed in harness.step().failed:
            harness.cancel(failed)
    num_failed = 0
    for sequence in sequences:
        first = sequence.request.input_token_ids[13 if sequence.tokens[:13] == [22] * 13 else 0]
        wanted, reason = fake.plain_answer(fake.Engine(), sequence.request)
        found = sequence.tokens[sequence.num_prompt_tokens :]
        if sequence.error is not None:
            assert isinstance(sequence.error, BadLogits) and first in failing
            assert found == wanted[: len(found)] and len(sequence.tokens) <= failing[first]
            num_failed += 1
        else:
            assert found == wanted and sequence.finish_reason is reason
    assert num_failed > 0 and harness.kv_cache.stats().used_num_blocks == 0
