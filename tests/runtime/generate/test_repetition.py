"""No n-gram twice: the bans are those of transformers, and drafts change nothing about them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.generate.repetition import NgramBans
from llmctl.runtime.request import Request, SamplingConfig

VOCAB = 4


def banned_by_transformers(size: int, tokens: list[int]) -> tuple[int, ...]:
    scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), torch.zeros(1, VOCAB))
    return tuple(torch.nonzero(scores[0].isneginf()).flatten().tolist())


@given(
    size=st.integers(1, 5),
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),  # committed
            st.lists(st.integers(0, VOCAB - 1), max_size=5),  # drafts that are thrown away
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_bans_after_any_tokens_and_drafts_are_those_of_transformers(size, steps):
    bans, tokens = NgramBans(size), []
    for committed, path in steps:
        tokens += committed
        assert bans.after(tokens, path) == banned_by_transformers(size, tokens + path)
        assert bans.after(tokens) == banned_by_transformers(size, tokens)


def test_a_size_beyond_every_sequence_bans_nothing():
    assert NgramBans(2**30).after([1, 1, 1], (1, 1)) == ()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_repeats_no_ngram_with_drafts_as_without(fake, size, temperature):
    config = SamplingConfig(temperature, top_k=0, seed=5, no_repeat_ngram_size=size)
    prompt = (3, 1, 4, 5) if size == 1 else (3, 1, 4, 1, 5)
    request = Request(prompt, 15 if size == 1 else 60, config)
    draft = fake.Engine(agreement=0.8)
    harness = fake.Harness(fake.Engine(), DraftEngineDrafter(draft, 4), draft=draft)
    sequence = harness.add(request)
    harness.run()
    tokens = sequence.tokens
    ngrams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    assert len(set(ngrams)) == len(ngrams)
    assert tokens[len(prompt) :] == fake.plain_answer(fake.Engine(), request)[0]
    free = Request(prompt, request.max_tokens, SamplingConfig(temperature, top_k=0, seed=5))
    if size < 3 or temperature == 0:  # else it happens to have none
        assert tokens[len(prompt) :] != fake.plain_answer(fake.Engine(), free)[0]
    assert harness.loop.stats.accepted_tokens > 0
    harness.sampler.release(sequence)
    assert not harness.sampler._ngrams


def test_a_device_that_sees_only_logits_leaves_them_to_the_host(fake):
    config = SamplingConfig(no_repeat_ngram_size=2)
    request = Request((3, 1, 4, 1, 5), 40, config)
    harness = fake.Harness(fake.Engine(), on_device=True)
    sequence = harness.add(request)
    harness.run()
    assert harness.runner.num_rounds == 0
    assert sequence.tokens[5:] == fake.plain_answer(fake.Engine(), request)[0]


def test_a_negative_size_is_refused():
    with pytest.raises(BadConfig, match="no_repeat_ngram_size is -1"):
        SamplingConfig(no_repeat_ngram_size=-1)
