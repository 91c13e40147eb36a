"""Fields of requests: their types and ranges, when they are set."""

from __future__ import annotations

import numpy as np
import pytest
from support.executor import PROMPT, answer

from llmctl.errors import BadConfig
from llmctl.runtime.request import Request, SamplingConfig, TypicalAcceptance


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 4.5}, "max_tokens is 4.5; it must be an integer"),
        ({"max_tokens": "4"}, "max_tokens is '4'; it must be an integer"),
        ({"max_tokens": None}, "max_tokens is None; it must be an integer"),
        ({"end_id": 2.0}, "end_id is 2.0; it must be an integer"),
        ({"max_draft_len": "2"}, "max_draft_len is '2'; it must be an integer"),
        ({"priority": "high"}, "priority is 'high'; it must be a number"),
        ({"allotted_time_ms": "5"}, "allotted_time_ms is '5'; it must be a number"),
        ({"sampling_config": 0.7}, "sampling_config is 0.7; it must be of class SamplingConfig"),
        ({"output_config": {}}, "output_config is {}; it must be of class OutputConfig"),
        ({"kv_cache_retention_config": 3}, "is 3; it must be of class KvCacheRetentionConfig"),
    ],
)
def test_a_request_s_field_of_another_type_is_named(fields, message):
    with pytest.raises(BadConfig) as refusal:
        Request(**{"input_token_ids": PROMPT, "max_tokens": 4, **fields})
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["top_k", "seed", "min_tokens", "no_repeat_ngram_size"])
def test_a_sampling_field_that_is_no_integer_is_named(name):
    with pytest.raises(BadConfig, match=rf"{name} is 1.5; it must be an integer"):
        SamplingConfig(**{name: 1.5})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_sampling_field_that_is_no_number_is_named(name):
    with pytest.raises(BadConfig, match=rf"{name} is '1'; it must be a number"):
        SamplingConfig(**{name: "1"})
    with pytest.raises(BadConfig, match="alpha is None; it must be a number"):
        TypicalAcceptance(alpha=None)


def test_numbers_of_numpy_are_numbers(make):
    sampling = SamplingConfig(np.float32(0.5), np.int64(3), top_p=np.float64(0.9), seed=np.int32(7))
    wanted = SamplingConfig(0.5, 3, top_p=0.9, seed=7)
    executor = make()
    found, same = (
        answer(executor, Request(PROMPT, count, config)).result
        for count, config in ((np.int64(5), sampling), (5, wanted))
    )
    assert found == same and len(found.output_token_ids) == 5


def test_what_is_no_request_is_refused_and_everybody_else_goes_on(make):
    executor = make()
    with pytest.raises(BadConfig, match=r"a request is \[1, 2\]; it must be of class Request"):
        executor.enqueue_requests([Request(PROMPT, 3), [1, 2]])
    assert len(answer(executor, Request(PROMPT, 3)).result.output_token_ids) == 3
