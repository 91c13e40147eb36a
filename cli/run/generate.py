"""Requests through an executor, outputs collected by row. No policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from llmctl.errors import ExecutorClosed, RankFailure
from llmctl.runtime.request import FinishReason, Request
from llmctl.runtime.response import Response, Result


class RequestQueue(Protocol):
    """What is needed of an executor."""

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]: ...
    def await_responses(self) -> list[Response]: ...


@dataclass(slots=True)
class SequenceOutput:
    """One returned sequence of a row."""

    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0  # also of those that were forgotten
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    # When its tokens came, in seconds since the batch was enqueued. Responses that were taken
    # together came at one time.
    first_s: float | None = None
    last_s: float = 0.0
    num_first_tokens: int = 0  # that came at first_s
    num_times: int = 0


@dataclass(slots=True)
class Row:
    """One prompt and what became of it: outputs, or the error that ended it."""

    index: int
    prompt: str
    request: Request | None = None
    error: Exception | None = None
    sequences: list[SequenceOutput] = field(default_factory=list)
    first_token_s: float | None = None  # since the batch was enqueued, of any sequence
    is_done: bool = False  # the last response has come

    @property
    def num_new_tokens(self) -> int:
        """Output tokens over all returned sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def has_ended(self) -> bool:
        """Nothing more comes."""
        return self.is_done or self.error is not None

    def forget_tokens(self) -> None:
        """Free what was handed on; counts and times stay."""
        for sequence in self.sequences:
            sequence.token_ids, sequence.log_probs = [], []


MOST_IN_FLIGHT = 1024

Listener = Callable[[Row, int], None]  # (row, index of the sequence that has new tokens)


def generate(
    executor: RequestQueue,
    rows: Sequence[Row],
    listener: Listener | None = None,
    *,
    max_in_flight: int = MOST_IN_FLIGHT,
    hand_on: Callable[[], None] = lambda: None,
) -> float:
    """Run every row that has a request to its end; returns the seconds from the first enqueue to
    the last response. Rows that already have an error are skipped.

    At most `max_in_flight` requests are with the executor at a time, of the highest priority first.
    `hand_on` is called whenever rows may have ended, also before the first.
    """
    asked = [(row, row.request) for row in rows if row.error is None and row.request is not None]
    for row, request in asked:
        count = request.sampling_config.num_return_sequences
        row.sequences = [SequenceOutput() for _ in range(count)]
    waiting = deque(sorted(asked, key=lambda item: -item[1].priority))
    by_id: dict[int, Row] = {}
    began = perf_counter()
    hand_on()
    if not waiting:
        return 0.0
    while waiting or by_id:
        count = min(len(waiting), max_in_flight - len(by_id))
        by_id |= _enqueue(executor, [waiting.popleft() for _ in range(count)])
        responses = executor.await_responses() if by_id else []
        now_s = perf_counter() - began
        if not responses:  # it closed without an answer to everybody
            closed = ExecutorClosed("the executor stopped before this request ended")
            for row in [*by_id.values(), *(row for row, _ in waiting)]:
                row.error = closed
            by_id.clear()
            waiting.clear()
        for response in responses:
            row = by_id[response.request_id]
            if row.first_token_s is None:
                row.first_token_s = now_s
            if response.result is None:
                row.error = response.error
                del by_id[response.request_id]
                continue
            _add(row, response.result, now_s)
            if listener is not None:
                listener(row, response.result.sequence_index)
            if response.result.is_final:
                row.is_done = True
                del by_id[response.request_id]
        hand_on()
    return perf_counter() - began


def _enqueue(executor: RequestQueue, asked: Sequence[tuple[Row, Request]]) -> dict[int, Row]:
    """Rows by the ids of their requests; none where the executor has ended, whose error they then
    have."""
    if not asked:
        return {}
    try:
        ids = executor.enqueue_requests([request for _, request in asked])
    except ExecutorClosed as closed:
        cause = closed.__cause__
        for row, _ in asked:
            row.error = cause if isinstance(cause, RankFailure) else closed
        return {}
    return dict(zip(ids, (row for row, _ in asked), strict=True))


def _add(row: Row, result: Result, now_s: float) -> None:
    """Append what a response brought; streaming responses carry only new tokens."""
    output = row.sequences[result.sequence_index]
    output.token_ids += result.output_token_ids
    output.num_tokens += len(result.output_token_ids)
    if result.output_token_ids:
        if output.first_s is None:
            output.first_s = now_s
        if output.first_s == now_s:
            output.num_first_tokens += len(result.output_token_ids)
        output.num_times += output.num_times == 0 or now_s > output.last_s
        output.last_s = now_s
    output.log_probs += result.log_probs or ()
    if result.cum_log_prob is not None:
        output.cum_log_prob = result.cum_log_prob
    output.finish_reason = result.finish_reason
