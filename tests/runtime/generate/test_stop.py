"""Stops, limits and bans, at every place of an accepted run."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor

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


@pytest.mark.parametrize("end_id", [None, 4])
def test_further_end_ids_end_as_the_first_does(end_id):
    sequence = sequence_of([], end_id=end_id, further_end_ids=(8, 9))
    assert first_stop(sequence, [5, 9, 5]) == (2, FinishReason.END_ID)
    assert first_stop(sequence, [5, 8, 9]) == (2, FinishReason.END_ID)
    assert first_stop(sequence, [5, 6, 5]) == (3, FinishReason.NOT_FINISHED)


def test_nothing_is_built_to_see_that_a_run_has_no_end_id():
    """It is asked of every sequence in every step."""
    sequence, run = sequence_of([], end_id=4, further_end_ids=(8, 9)), [5, 6, 7]
    first_stop(sequence, run)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        first_stop(sequence, run)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before < sys.getsizeof(frozenset())


@pytest.mark.parametrize("end_id", [None, 4])
@pytest.mark.parametrize("num_new", range(4))
def test_no_end_id_comes_before_min_tokens_as_in_transformers(end_id, num_new):
    config = SamplingConfig(min_tokens=2)
    request = Request(PROMPT, 9, config, end_id=end_id, further_end_ids=(0, 7))
    sequence = Sequence(1, 1, request, 0, [*PROMPT, *range(num_new)], len(PROMPT), 12)
    ends = [0, 7] if end_id is None else [end_id, 0, 7]
    scores = MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, ends, device="cpu")(
        torch.tensor([sequence.tokens]), torch.zeros(1, 10)
    )
    wanted = torch.nonzero(torch.isinf(scores[0])).flatten().tolist()
    sampler = Sampler(10, ReferenceSampling())
    assert sorted(sampler.row(sequence).banned) == wanted
    assert sampler.is_plain(sequence) is not bool(wanted)


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


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_bad_words_of_several_lengths_are_those_of_transformers_in_histories_of_any_length(
    num_drafts,
):
    generator, vocab = np.random.default_rng(7), 4
    sampler = Sampler(vocab, ReferenceSampling())
    num_banned = 0
    for history in range(4, 12):  # transformers looks at no word longer than the history
        for _ in range(8):
            words = {
                tuple(generator.integers(0, vocab, size).tolist())
                for size in generator.integers(1, history + 1, 6)
            }
            tokens = generator.integers(0, vocab, history).tolist()
            split = history - num_drafts
            request = Request(tuple(tokens[:split]), 9, bad_words=tuple(sorted(words)))
            sequence = Sequence(1, 1, request, 0, tokens[:split], split, 50)
            scores = NoBadWordsLogitsProcessor([list(word) for word in words])(
                torch.tensor([tokens]), torch.zeros(1, vocab)
            )
            wanted = set(torch.nonzero(torch.isinf(scores[0])).flatten().tolist())
            assert set(sampler.row(sequence, tokens[split:]).banned) == wanted
            num_banned += len(wanted)
    assert num_banned > 50


def test_a_bad_word_longer_than_the_history_does_not_hide_another():
    sampler = Sampler(23, ReferenceSampling())
    sequence = sequence_of([], bad_words=((*PROMPT, 6), (0, 0, 0, 0, 0, 7)))
    assert sampler.row(sequence).banned == (6,)


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
