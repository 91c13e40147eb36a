"""Values of a wrong type are refused by name where they are set: none reaches a step."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from support.executor import PROMPT, answer, collect, config

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.errors import BadConfig
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.api.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from llmctl.runtime.request import (
    FinishReason,
    OutputConfig,
    Request,
    SamplingConfig,
    TypicalAcceptance,
)

GOOD = {
    Request: Request(PROMPT, 5),
    SamplingConfig: SamplingConfig(),
    OutputConfig: OutputConfig(),
    TypicalAcceptance: TypicalAcceptance(),
    KvCacheRetentionConfig: KvCacheRetentionConfig(),
    TokenRangeRetentionConfig: TokenRangeRetentionConfig(0),
}
FIELDS = [(cls, field.name) for cls in GOOD for field in fields(cls)]
OF_TOKENS = ("input_token_ids", "stop_words", "bad_words", "further_end_ids")  # lists are fine


@pytest.fixture
def executor(fake):
    with Executor(fake.Engine(), None, config(), ReferenceSampling()) as executor:
        yield executor


@pytest.mark.parametrize("value", ["1", {}, object, [[1]]], ids=repr)
@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{c.__name__}.{n}" for c, n in FIELDS])
def test_no_field_takes_text_or_what_it_knows_nothing_of(cls, name, value):
    if isinstance(value, list) and name in OF_TOKENS:
        return
    with pytest.raises(BadConfig, match=rf"^{name} is .*; it must be ") as caught:
        replace(GOOD[cls], **{name: value})
    assert type(value).__name__ in str(caught.value) and cls.__name__ in caught.value.fix


@pytest.mark.parametrize(
    ("cls", "name", "value", "wanted"),
    [
        (Request, "max_tokens", 3.5, "an integer"),
        (Request, "max_tokens", True, "an integer"),
        (Request, "end_id", 1.5, "an integer, or None"),
        (Request, "max_draft_len", False, "an integer, or None"),
        (Request, "priority", True, "a number"),
        (Request, "streaming", 1, "True or False"),
        (Request, "lookahead_config", (4, 3, 4), "of type LookaheadDecodingConfig, or None"),
        (Request, "sampling_config", None, "of type SamplingConfig"),
        (SamplingConfig, "seed", True, "an integer"),
        (SamplingConfig, "seed", 1.0, "an integer"),
        (SamplingConfig, "top_k", 2.5, "an integer, or None"),
        (SamplingConfig, "temperature", 1j, "a number"),
        (SamplingConfig, "temperature", 10**400, "a number"),
        (SamplingConfig, "typical_acceptance", 0.3, "of type TypicalAcceptance, or None"),
        (KvCacheRetentionConfig, "token_range_retention_configs", (1,), "TokenRangeRetention"),
    ],
)
def test_numbers_of_another_kind_are_refused(cls, name, value, wanted):
    with pytest.raises(BadConfig, match=f"^{name} is .*; it must be .*{wanted}"):
        replace(GOOD[cls], **{name: value})


def test_no_more_tokens_are_wanted_than_may_be_generated():
    """They were: outputs ended with max_tokens, before the min_tokens asked for."""
    with pytest.raises(
        BadConfig, match="min_tokens is 9; it must be at most max_tokens, which is 8"
    ):
        Request((1, 2), 8, SamplingConfig(min_tokens=9))
    assert Request((1, 2), 9, SamplingConfig(min_tokens=9)).max_tokens == 9


def test_numbers_of_numpy_and_lists_are_stored_as_pythons():
    """Beyond 2^63 an integer of numpy would overflow in a draw."""
    sampling = SamplingConfig(np.float32(0.5), np.int32(7), seed=np.uint64(2**64 - 1))
    request = Request([1, 2], np.int64(3), sampling, stop_words=[[4]])
    values = (request.input_token_ids, request.max_tokens, sampling.top_k, sampling.seed)
    assert values == ((1, 2), 3, 7, 2**64 - 1) and request.stop_words == ((4,),)
    assert [type(v) for v in values] == [tuple, int, int, int]
    assert type(sampling.temperature) is float and sampling.temperature == 0.5
    assert replace(request, lookahead_config=LookaheadDecodingConfig()).lookahead_config is not None


@pytest.mark.parametrize("form", [list, np.array, tuple], ids=lambda form: form.__name__)
def test_words_are_found_whatever_sequences_they_are_in(executor, form):
    """Lists were taken, and then equalled no tokens: outputs had bad words, and went past stop
    words."""
    plain = answer(executor, Request(PROMPT, 6)).result.output_token_ids
    words = form([form(plain[1:3])])
    stopped = answer(executor, Request(PROMPT, 6, stop_words=words)).result
    assert stopped.finish_reason is FinishReason.STOP_WORDS
    assert stopped.output_token_ids == plain[:3]
    banned = answer(executor, Request(PROMPT, 6, bad_words=words)).result.output_token_ids
    assert banned[:2] == plain[:2] and banned[2] != plain[2]


def test_a_word_that_is_no_list_is_refused_where_it_is_set():
    for words in ((1, 2), ["ab"], [np.int64(3)]):
        with pytest.raises(BadConfig, match="^stop_words is .*a sequence of lists of token ids"):
            Request(PROMPT, 3, stop_words=words)
    with pytest.raises(BadConfig, match="^bad_words is an empty word"):
        Request(PROMPT, 3, bad_words=[np.array([], int)])


def test_true_is_no_token(executor):
    for words in ({}, {"stop_words": ((True,),)}, {"further_end_ids": (True,)}):
        prompt = PROMPT if words else (True, *PROMPT)
        error = answer(executor, Request(prompt, 3, **words)).error
        assert type(error) is BadConfig and "holds what is no token id: (True" in str(error)


@pytest.mark.parametrize("other", [{"input_token_ids": PROMPT}, None, PROMPT], ids=repr)
def test_what_is_no_request_is_refused_and_the_others_are_not_lost(executor, other):
    """It ended the thread of the executor, and who waited for an answer waited for ever."""
    for enqueue in (executor.enqueue_request, lambda item: executor.enqueue_requests([item])):
        with pytest.raises(BadConfig, match="is no Request"):
            enqueue(other)
    with pytest.raises(BadConfig, match="is no Request"):
        executor.enqueue_requests([Request(PROMPT, 3), other])
    for one in (Request(PROMPT, 3), None, iter([Request(PROMPT, 3)])):
        with pytest.raises(BadConfig, match="is no list of requests"):
            executor.enqueue_requests(one)
    assert not collect(executor, executor.enqueue_request(Request(PROMPT, 3)))[-1].has_error
    assert executor.get_num_responses_ready() == 0
