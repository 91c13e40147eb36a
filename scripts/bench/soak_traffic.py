"""Random requests for a soak, what each answers alone, and traffic of them that is checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig
from llmctl.runtime.response import Response

STALL_S = 60.0  # an executor that says nothing for so long, with requests in it, hangs
CANCELLED = 0.1  # of the requests
MOST_NEW = 96  # tokens of an output
KINDS = (
    SamplingConfig(),
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=5),  # without filters: ranks merge draws
    SamplingConfig(temperature=1.2, top_k=0, seed=6, num_return_sequences=2),
    SamplingConfig(temperature=0.9, top_k=40, top_p=0.9, seed=7),
    SamplingConfig(temperature=1.0, top_k=0, min_p=0.05, seed=8),
    SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.1),
)
DRAFT_LIMITS = (None, None, None, None, 0, 3)
PRIORITIES = (0.5, 0.5, 0.0, 1.0)
Texts = tuple[tuple[int, ...], ...]  # of a request, by returned sequence


@dataclass
class Totals:
    """What happened, and which requests were answered wrongly."""

    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Answer:
    """What came of one request so far."""

    index: int
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by returned sequence
    cancel_s: float | None = None  # when
    is_cancelled: bool = False

    @property
    def texts(self) -> Texts:
        """In the order of the sequences."""
        return tuple(tuple(self.tokens[index]) for index in sorted(self.tokens))

    def is_right(self, wanted: Texts) -> bool:
        """Of a cancelled request what came before it was."""
        if not self.is_cancelled:
            return self.texts == wanted
        return all(wanted[i][: len(own)] == tuple(own) for i, own in self.tokens.items())


class Traffic:
    """Requests in flight, by id."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._open: dict[int, Answer] = {}
        self._heard_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def send(self, index: int, request: Request, cancel_s: float | None = None) -> None:
        """Enqueue; it is cancelled at that time, if it still runs."""
        request_id = self._executor.enqueue_request(request)
        self._open[request_id] = Answer(index, cancel_s=cancel_s)

    def receive(self) -> list[Answer]:
        """Those that ended within 50 ms. Raises the error of a request that failed, and
        TimeoutError where nothing is said any more."""
        now = time.monotonic()
        for request_id, answer in self._open.items():
            if answer.cancel_s is not None and answer.cancel_s <= now and not answer.is_cancelled:
                self._executor.cancel_request(request_id)
                answer.is_cancelled = True
        responses = self._executor.await_responses(timeout_s=0.05)
        if responses:
            self._heard_s = now
        elif now - self._heard_s > STALL_S:
            raise TimeoutError(f"no response for {STALL_S:g} s, {len(self)} requests are open")
        return [answer for each in responses if (answer := self._take(each)) is not None]

    def _take(self, response: Response) -> Answer | None:
        if response.error is not None:
            raise response.error
        assert response.result is not None
        result, answer = response.result, self._open[response.request_id]
        answer.tokens.setdefault(result.sequence_index, []).extend(result.output_token_ids)
        return self._open.pop(response.request_id) if result.is_final else None


def make_requests(
    generator: np.random.Generator, ids: tuple[int, int], longest: int, count: int
) -> list[Request]:
    """Greedy, seeded, filtered and penalized; prompts share beginnings, and some take several
    chunks. ids: the first token of prompts, and the one behind their last; longest: tokens of a
    prompt."""
    text = generator.integers(*ids, 4 * longest)
    lengths = [min(n, longest) for n in (1, 31, 33, 150, 64, 5, 700, longest)]
    made = []
    for number in range(count):
        start, length = 97 * int(generator.integers(4)), lengths[number % len(lengths)]
        sampling = KINDS[number % len(KINDS)]
        made.append(
            Request(
                tuple(text[start : start + length].tolist()),
                int(generator.integers(4, MOST_NEW)),
                sampling if sampling.is_greedy else replace(sampling, seed=number << 33),
                OutputConfig(return_log_probs=number % 11 == 5),
                streaming=number % 3 == 0,
            )
        )
    return made


def run_alone(executor: Executor, requests: Sequence[Request]) -> list[Texts]:
    """What each answers, one after the other."""
    traffic, found = Traffic(executor), []
    for request in requests:
        traffic.send(0, request)
        while len(traffic):
            found += [answer.texts for answer in traffic.receive()]
    return found


def run_for(
    executor: Executor,
    requests: Sequence[Request],
    wanted: Sequence[Texts],
    seconds: float,
    generator: np.random.Generator,
    most: int,
) -> Totals:
    """Traffic of up to `most` requests at a time, each with a limit of drafts and a priority of its
    own; some are cancelled while they wait or run."""
    traffic, totals, end = Traffic(executor), Totals(), time.monotonic() + seconds
    while len(traffic) or time.monotonic() < end:
        while len(traffic) < most and (now := time.monotonic()) < end:
            index = int(generator.integers(len(requests)))
            request = replace(
                requests[index],
                max_draft_len=DRAFT_LIMITS[generator.integers(len(DRAFT_LIMITS))],
                priority=PRIORITIES[generator.integers(len(PRIORITIES))],
            )
            is_cancelled = generator.random() < CANCELLED
            traffic.send(index, request, now + generator.exponential(0.3) if is_cancelled else None)
            totals.requests += 1
        for answer in traffic.receive():
            totals.tokens += sum(map(len, answer.texts))
            totals.cancelled += answer.is_cancelled
            if not answer.is_right(wanted[answer.index]):
                sampling = requests[answer.index].sampling_config
                totals.wrong.append(f"request {answer.index} ({sampling}): {answer.texts}")
    return totals
