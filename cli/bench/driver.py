"""Runs a load through an executor and records what happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Protocol

import numpy as np

from llmctl.cli.bench.records import Arrival, Clock, Recording, RequestRecord
from llmctl.errors import BadConfig, RankFailure, RequestError
from llmctl.runtime.request import FinishReason, Request
from llmctl.runtime.response import Response
from llmctl.runtime.stats.counters import IterationStats


class Server(Protocol):
    """What the driver needs of an executor."""

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]: ...
    def await_responses(
        self, request_id: None = None, timeout_s: float | None = None
    ) -> list[Response]: ...
    def get_latest_iteration_stats(self) -> list[IterationStats]: ...


MOST_ARRIVALS_S = 86_400.0  # a day: a rate with a slip in its exponent would wait for years


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are submitted. concurrency None: no limit on requests in flight.

    request_rate, requests per second, makes arrivals a Poisson process; None: as soon as allowed.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    seed: int = 0

    def due_times_s(self, count: int) -> list[float]:
        """When each request is due, the first at 0."""
        if self.request_rate is None:
            return [0.0] * count
        gaps = np.random.default_rng(self.seed).exponential(1 / self.request_rate, count)
        times: list[float] = np.concatenate(([0.0], np.cumsum(gaps)[:-1])).tolist()
        return times

    def refuse_endless(self, count: int) -> None:
        """Raise BadConfig where the last of so many requests would be submitted after a day."""
        if self.request_rate is None or self.due_times_s(count)[-1] <= MOST_ARRIVALS_S:
            return
        raise BadConfig(
            f"--request-rate is {self.request_rate:g} requests per second, and the last of {count} "
            "would arrive after more than a day; it must arrive within one",
            fix=f"raise the rate ({(count - 1) / 3600:.2g} takes an hour), or run fewer requests",
        )


_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.TIMED_OUT)

Progress = Callable[[RequestRecord], None]


def add_iteration(
    recording: Recording, requests: Sequence[Request], pace: Pace
) -> list[RequestRecord]:
    """Add an iteration to a recording: an empty record for each request, in order."""
    due = pace.due_times_s(len(requests))
    records = [
        RequestRecord(
            index, recording.num_iterations, len(r.input_token_ids), r.max_tokens, due[index]
        )
        for index, r in enumerate(requests)
    ]
    recording.num_iterations += 1
    recording.requests += records
    return records


class Driver:
    """Runs loads through one executor, one after another."""

    def __init__(self, server: Server, progress: Progress = lambda record: None) -> None:
        self._server = server
        self._progress = progress

    def run(self, requests: Sequence[Request], pace: Pace, recording: Recording) -> None:
        """Add one iteration to the recording. If anything is raised, it contains what came before.

        Raises RequestError when the executor stops, RankFailure when a rank is lost.
        """
        records = add_iteration(recording, requests, pace)
        self._server.get_latest_iteration_stats()  # those of what ran before
        clock = Clock()
        waiting = deque(records)
        running: dict[int, RequestRecord] = {}
        indexes: dict[int, int] = {}
        while waiting or running:
            ready = _take_ready(waiting, len(running), pace.concurrency, clock.now_s())
            if ready:
                submit_s = clock.now_s()
                ids = self._server.enqueue_requests([requests[item.index] for item in ready])
                for request_id, item in zip(ids, ready, strict=True):
                    item.submit_s = submit_s
                    running[request_id] = item
                    indexes[request_id] = item.index
            has_room = pace.concurrency is None or len(running) < pace.concurrency
            left_s = waiting[0].due_s - clock.now_s() if waiting and has_room else None
            if not running:
                sleep(max(0.0, left_s or 0.0))
                continue
            timeout_s = None if left_s is None else max(0.0, left_s)
            responses = self._server.await_responses(timeout_s=timeout_s)
            now_s = clock.now_s()
            if not responses and timeout_s is None:
                raise RequestError("the executor stopped before every request had ended")
            for response in responses:
                self._take(response, running, now_s)
            recording.add_steps(self._server.get_latest_iteration_stats(), clock, indexes)

    def _take(self, response: Response, running: dict[int, RequestRecord], now_s: float) -> None:
        record = running[response.request_id]
        result = response.result
        if result is None:
            error = response.error
            if isinstance(error, RankFailure):  # every later request would fail, too
                raise error
            record.error = f"{type(error).__name__}: {error}"
        elif result.output_token_ids:
            record.arrivals.append(Arrival(now_s, len(result.output_token_ids)))
            record.output_ids += result.output_token_ids
        if result is None or result.is_final:
            record.is_done = result is not None and result.finish_reason not in _CUT_SHORT
            del running[response.request_id]
        self._progress(record)


def _take_ready(
    waiting: deque[RequestRecord], num_running: int, concurrency: int | None, now_s: float
) -> list[RequestRecord]:
    """The next requests that are due and may run together with those in flight."""
    ready: list[RequestRecord] = []
    while waiting and waiting[0].due_s <= now_s:
        if concurrency is not None and num_running + len(ready) >= concurrency:
            break
        ready.append(waiting.popleft())
    return ready
