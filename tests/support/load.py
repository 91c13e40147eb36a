"""Random traffic for an executor, and what each request must answer whatever else runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import FinishReason, OutputConfig, Request, SamplingConfig
from llmctl.runtime.response import Response

WAIT_S = 30.0  # a device that says nothing for so long hangs
MAX_GAP_S = (0.002, 0.02)  # between arrivals: a burst first, then one by one
PromptMaker = Callable[[int, int], tuple[int, ...]]  # (start, length) of a text's ids


@dataclass
class Outcome:
    """One request's answer: by returned sequence, and whether it was cancelled."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    is_final: bool = False

    def take(self, response: Response) -> None:
        """Add what a response carries."""
        assert response.result is not None, response.error
        result = response.result
        assert not self.is_final, "a response after the last"
        self.is_final = result.is_final
        self.tokens.setdefault(result.sequence_index, []).extend(result.output_token_ids)
        self.log_probs.setdefault(result.sequence_index, []).extend(result.log_probs or ())
        if result.is_sequence_final:
            self.reasons[result.sequence_index] = result.finish_reason


def random_config(generator: np.random.Generator, penalties: float) -> SamplingConfig:
    """Greedy or seeded, filtered in any way; this share with penalties, which the host draws."""
    common = {
        "seed": int(generator.integers(2**63)) * 2,
        "min_tokens": int(generator.integers(6)) if generator.random() < 0.2 else 0,
        "num_return_sequences": int(generator.choice([1, 1, 1, 1, 2, 3])),
    }
    if generator.random() < penalties:
        if generator.random() < 0.5:
            return SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2, **common)
        return SamplingConfig(temperature=0.8, top_k=0, presence_penalty=0.6, **common)
    style = generator.random()
    if style < 0.4:
        return SamplingConfig(**common)
    if style < 0.55:
        return SamplingConfig(temperature=float(generator.uniform(0.3, 1.5)), top_k=0, **common)
    if style < 0.7:
        return SamplingConfig(temperature=0.9, top_k=int(generator.integers(2, 60)), **common)
    if style < 0.8:
        return SamplingConfig(temperature=1.1, top_p=float(generator.uniform(0.4, 1)), **common)
    return SamplingConfig(temperature=1.3, top_k=40, top_p=0.9, min_p=0.03, **common)


def random_requests(
    generator: np.random.Generator, prompt: PromptMaker, vocab: int, count: int
) -> list[Request]:
    """Prompts of 1 token to several chunks, a third of them with a beginning that others share.

    What only the host can do (penalties, bad words, log probabilities) is mostly asked for early
    on: one such request in a step has the host draw for its batch mates too.
    """
    requests = []
    for index in range(count):
        rare = 0.15 if index < count // 3 else 0.01
        length = int(generator.choice([1, 2, 31, 32, 33, 64, 100, 250, 400]))
        start = 0 if generator.random() < 0.35 else int(generator.integers(1, 3000))
        ids = prompt(start, length)
        word = tuple(generator.integers(2, vocab, 2).tolist())
        has_log_probs = generator.random() < rare
        most, config = int(generator.integers(1, 120)), random_config(generator, rare)
        requests.append(
            Request(
                ids,
                max(most, config.min_tokens),
                config,
                OutputConfig(return_log_probs=has_log_probs),
                streaming=bool(generator.random() < 0.5),
                end_id=int(generator.choice([1, ids[-1]])) if generator.random() < 0.5 else None,
                stop_words=(word, ids[:2]) if generator.random() < 0.2 else (),
                bad_words=((word[0],), word) if generator.random() < rare else (),
            )
        )
    return requests


def run_alone(executor: Executor, requests: Sequence[Request]) -> list[Outcome]:
    """One request after another."""
    outcomes = []
    for request in requests:
        outcome = Outcome()
        number = executor.enqueue_request(request)
        while not outcome.is_final:
            responses = executor.await_responses(number, timeout_s=WAIT_S)
            assert responses, "no response"
            for response in responses:
                outcome.take(response)
        outcomes.append(outcome)
    return outcomes


def run_under_load(
    executor: Executor, requests: Sequence[Request], generator: np.random.Generator
) -> list[Outcome]:
    """All requests at random times, some cancelled; every one of them ends."""
    outcomes: dict[int, Outcome] = {}
    last = time.monotonic()

    def receive(timeout_s: float) -> None:
        nonlocal last
        for response in executor.await_responses(timeout_s=timeout_s):
            outcomes[response.request_id].take(response)
            last = time.monotonic()
        assert time.monotonic() - last < WAIT_S, "no response"

    for index, request in enumerate(requests):
        number = executor.enqueue_request(request)
        outcomes[number] = Outcome()
        if generator.random() < 0.5:  # else it arrives together with the next
            most = MAX_GAP_S[index > len(requests) // 2]
            receive(float(generator.uniform(0, most)))
        if generator.random() < 0.06:
            executor.cancel_request(int(generator.choice(list(outcomes))))
    while not all(outcome.is_final for outcome in outcomes.values()):
        receive(1.0)
    return list(outcomes.values())


def differences(
    requests: Sequence[Request], found: Sequence[Outcome], wanted: Sequence[Outcome]
) -> list[str]:
    """Requests whose answer is not the one they get alone; of cancelled ones, its beginning."""
    wrong = []
    for index, (request, one, alone) in enumerate(zip(requests, found, wanted, strict=True)):
        count = request.sampling_config.num_return_sequences
        for i in range(count):
            tokens, answer = one.tokens.get(i, []), alone.tokens[i]
            if one.reasons.get(i) is FinishReason.CANCELLED:
                answer = answer[: len(tokens)]
            elif one.reasons.get(i) is not alone.reasons[i]:
                wrong.append(f"{index}.{i}: {one.reasons.get(i)}, alone {alone.reasons[i]}")
            elif one.log_probs[i] != alone.log_probs[i]:
                wrong.append(f"{index}.{i}: other log probabilities")
            if tokens != answer:
                pairs = zip(tokens, answer, strict=False)
                place = next((p for p, (x, y) in enumerate(pairs) if x != y), len(answer))
                wrong.append(f"{index}.{i}: token {place} differs ({request.sampling_config})")
    return wrong
