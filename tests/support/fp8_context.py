"""Prompts of several groups of tokens that are read with FP8 products, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import OutputConfig, Request
from support.executor import collect

VOCABULARY = 131  # of support/random_models.py
Said = tuple[tuple[int, ...], tuple[float, ...] | None]  # tokens and their log-probabilities


def make_requests(*, with_log_probs: bool = True) -> list[Request]:
    """Prompts of which some begin alike; one with no group and some that end beside one."""
    generator = np.random.default_rng(11)
    stem = generator.integers(0, VOCABULARY, 700).tolist()
    prompts = [
        *(stem[:690], stem[:600], [*stem[:530], 7, 8, 9], stem[:513], stem[:512], stem[:257]),
        *(generator.integers(0, VOCABULARY, count).tolist() for count in (31, 300)),
    ]
    output = OutputConfig(return_log_probs=with_log_probs)
    return [Request(tuple(prompt), 40, output_config=output) for prompt in prompts]


def say(executor: Executor, requests: Sequence[Request]) -> list[Said]:
    """Tokens and log-probabilities of requests that run together."""
    found = []
    for request_id in [executor.enqueue_request(request) for request in requests]:
        result = collect(executor, request_id)[-1].result
        found.append((result.output_token_ids, result.log_probs))
    return found


def next_turns(requests: Sequence[Request], said: Sequence[Said]) -> list[Request]:
    """Each with what was said of it and a few tokens more as its prompt."""
    return [
        replace(request, input_token_ids=(*request.input_token_ids, *tokens, 5, 6, 7))
        for request, (tokens, _) in zip(requests, said, strict=True)
    ]


def check_next_turns(
    open_executor: Callable[[bool], AbstractContextManager[Executor]],
    requests: Sequence[Request],
    alone: Sequence[Said],
) -> None:
    """What was generated is read as a prompt, again where its products are others then: the next
    turn says what it says without what is cached. open_executor(whether blocks are reused)."""
    turns = next_turns(requests, alone)
    with open_executor(False) as executor:
        wanted = [say(executor, [turn])[0] for turn in turns]
    with open_executor(True) as executor:
        assert say(executor, requests) == alone
        assert say(executor, turns) == wanted


def check_continued(
    executor: Executor, requests: Sequence[Request], alone: Sequence[Said], *, places: int = 3
) -> None:
    """Prompts that end within what was said are continued by the rest of it, with the same
    log-probabilities."""
    for request, (tokens, log_probs) in zip(requests, alone, strict=True):
        assert log_probs is not None
        for taken in np.linspace(1, len(tokens) - 1, places).astype(int).tolist():
            prompt = (*request.input_token_ids, *tokens[:taken])
            rest = replace(request, input_token_ids=prompt, max_tokens=request.max_tokens - taken)
            (found,) = say(executor, [rest])
            assert found == (tokens[taken:], log_probs[taken:]), taken


def check_same(executor: Executor, requests: Sequence[Request], alone: Sequence[Said]) -> None:
    """Requests that run together, in two orders and without log-probabilities, say what each says
    alone, and blocks are reused."""
    in_rounds = make_requests(with_log_probs=False)
    assert say(executor, requests) == alone
    assert say(executor, requests[::-1])[::-1] == alone, "with blocks that are reused"
    assert [said for said, _ in say(executor, in_rounds)] == [said for said, _ in alone], (
        "in device rounds"
    )
    assert executor._worker.kv_cache.stats().reused_blocks > 0
