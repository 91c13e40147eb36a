"""Stops, limits and bans, at every place of an accepted run."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.generate.stop import banned_next, first_stop
from llmctl.runtime.request import FinishReason, OutputConfig, Request, SamplingConfig, Sequence

PROMPT = (1, 2, 3)


def sequence_of(new: list[int], max_tokens: int = 50, **rest) -> Sequence:
    request = Request(PROMPT, max_tokens, **rest)
    return Sequence(1, 1, request, 0, [*PROMPT, *new], len(PROMPT), len(PROMPT) + max_tokens)


def test_a_run_without_a_stop_is_kept_whole():
    assert first_stop(sequence_of([]), [5, 6]) == (2, FinishReason.NOT_FINISHED)


@pytest.mark.parametrize("place", range(5))
def test_the_end_id_cuts_the_run_after_itself(place):
    run = [5, 5, 5, 5, 5]
    run[place] = 9
    found = first_stop(sequence_of([], end_id=9), run)
    assert found == (place + 1, FinishReason.END_ID)


@pytest.mark.parametrize("place", range(2, 7))
def test_a_stop_word_is_found_wherever_it_ends_in_the_run(place):
    run = [5] * 7
    run[place - 1 : place + 1] = [7, 8]
    found = first_stop(sequence_of([], stop_words=((7, 8),)), run)
    assert found == (place + 1, FinishReason.STOP_WORDS)


def test_a_stop_word_may_span_rounds_but_not_begin_in_the_prompt():
    assert first_stop(sequence_of([7], stop_words=((7, 8),)), [8, 4])[0] == 1
    assert first_stop(sequence_of([6, 7], stop_words=((6, 7, 8),)), [8, 4])[0] == 1
    across_the_prompt = sequence_of([], stop_words=((3, 8),))
    assert first_stop(across_the_prompt, [8, 4]) == (2, FinishReason.NOT_FINISHED)


@pytest.mark.parametrize("room", range(1, 5))
def test_the_length_limit_cuts_the_run(room):
    found = first_stop(sequence_of([5, 5], max_tokens=2 + room), [6] * 4)
    assert found == (room, FinishReason.LENGTH)


def test_an_end_id_on_the_last_place_is_an_end_not_a_length():
    assert first_stop(sequence_of([], max_tokens=2, end_id=9), [5, 9])[1] is FinishReason.END_ID


def test_stop_words_wait_for_min_tokens():
    config = SamplingConfig(min_tokens=3)
    found = first_stop(sequence_of([], stop_words=((7,),), sampling_config=config), [7, 7, 7, 7])
    assert found == (3, FinishReason.STOP_WORDS)


def test_bad_words_ban_their_last_token_after_the_others_and_the_end_id_waits():
    request = Request(
        PROMPT, 9, SamplingConfig(min_tokens=2), end_id=0, bad_words=((5,), (3, 6), (2, 3, 7))
    )
    assert banned_next(request, PROMPT, 0) == (5, 6, 7, 0)
    assert banned_next(request, (1, 3, 4), 2) == (5,)
    assert banned_next(request, (3,), 2) == (5, 6)


def plain_tokens(fake, count: int) -> list[int]:
    return fake.plain_answer(fake.Engine(), Request(PROMPT, count))[0]


@pytest.mark.parametrize("draft_len", [1, 3, 6])
@pytest.mark.parametrize("kind", ["end_id", "stop_words", "max_tokens"])
def test_whatever_offset_a_stop_has_in_an_accepted_run_the_output_ends_there(fake, kind, draft_len):
    tokens = plain_tokens(fake, 24)
    wanted_offsets = set()
    for length in range(1, 24):
        rest = {"max_tokens": length}
        if kind == "end_id":
            rest = {"max_tokens": 24, "end_id": tokens[length - 1]}
        elif kind == "stop_words" and length > 1:
            rest = {"max_tokens": 24, "stop_words": (tuple(tokens[length - 2 : length]),)}
        request = Request(PROMPT, output_config=OutputConfig(return_log_probs=True), **rest)
        draft = fake.Engine()
        harness = fake.Harness(fake.Engine(), DraftEngineDrafter(draft, draft_len), draft=draft)
        sequence = harness.add(request)
        while harness.scheduler.has_work:
            last = harness.step().commits[-1]
        wanted, reason = fake.plain_answer(harness.target, request)
        assert sequence.tokens[len(PROMPT) :] == wanted
        assert sequence.finish_reason is reason
        assert len(sequence.log_probs) == len(wanted)
        wanted_offsets.add(last.num_tokens)
        stats = harness.loop.stats  # a round ends in a draft only where the stop was one
        assert stats.accepted_tokens + stats.rounds - (len(wanted) - 1) in (0, 1)
    assert len(wanted_offsets) >= min(draft_len, 3)


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_bad_words_of_several_lengths_ban_what_transformers_bans(num_tokens: int) -> None:
    draws = random.Random(num_tokens)
    for _ in range(40):
        ids = draws.choices(range(4), k=num_tokens)
        words = tuple(
            tuple(draws.choices(range(4), k=length)) for length in draws.sample(range(1, 9), 3)
        )
        masked = NoBadWordsLogitsProcessor([list(word) for word in words])(
            torch.tensor([ids]), torch.zeros(1, 4)
        )
        wanted = set(masked[0].isinf().nonzero().flatten().tolist())
        for num_drafts in {0, num_tokens // 2}:  # of which the last tokens of the history are
            committed = ids[: num_tokens - num_drafts]
            request = Request(tuple(committed), 9, bad_words=words)
            sequence = Sequence(0, 0, request, 0, list(committed), len(committed), 20)
            row = Sampler(4, ReferenceSampling()).row(sequence, ids[len(committed) :])
            assert set(row.banned) == wanted, (ids, words, num_drafts)
