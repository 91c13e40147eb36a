"""Requests through an executor, outputs collected by row. No policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from llmctl.errors import RequestError
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

    @property
    def num_new_tokens(self) -> int:
        """Output tokens over all returned sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


Listener = Callable[[Row, int], None]  # (row, index of the sequence that has new tokens)


def generate(
    executor: RequestQueue, rows: Sequence[Row], listener: Listener | None = None
) -> float:
    """Run every row that has a request to its end; returns the seconds from the first enqueue to
    the last response. Rows that already have an error are skipped."""
    pending = [row for row in rows if row.error is None and row.request is not None]
    requests = [row.request for row in pending if row.request is not None]
    for row, request in zip(pending, requests, strict=True):
        count = request.sampling_config.num_return_sequences
        row.sequences = [SequenceOutput() for _ in range(count)]
    began = perf_counter()
    if not requests:
        return 0.0
    by_id = dict(zip(executor.enqueue_requests(requests), pending, strict=True))
    while by_id:
        responses = executor.await_responses()
        now_s = perf_counter() - began
        if not responses:  # it closed without an answer to everybody
            for row in by_id.values():
                row.error = RequestError("the executor stopped before this request ended")
            break
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
                del by_id[response.request_id]
    return perf_counter() - began


def _add(row: Row, result: Result, now_s: float) -> None:
    """Append what a response brought; streaming responses carry only new tokens."""
    output = row.sequences[result.sequence_index]
    output.token_ids += result.output_token_ids
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
