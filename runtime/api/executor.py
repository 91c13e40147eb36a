"""The executor: requests from any thread in, responses out, one worker thread in between.

The API is that of TensorRT-LLM's C++ executor, in snake_case. Every request ends in exactly one of
finished, refused, cancelled or failed; see `runtime.worker`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, overload

from llmctl.errors import BadConfig, ExecutorClosed
from llmctl.plugins.ops.sampling.spec import SamplingBackend
from llmctl.runtime.api import freezing
from llmctl.runtime.api.executor_config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.api.field_types import as_type
from llmctl.runtime.api.inbox import Inbox
from llmctl.runtime.api.mailbox import Deliver, Mailbox
from llmctl.runtime.assembly import assemble
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.kv_cache import KvCacheEventManager
from llmctl.runtime.request import FinishReason, Request
from llmctl.runtime.response import Response
from llmctl.runtime.rounds.rounds import RoundRunner
from llmctl.runtime.stats.counters import IterationStats, RequestStatsPerIteration, SpeculationStats
from llmctl.runtime.step import StepRunner
from llmctl.runtime.worker import Worker

__all__ = ["Executor", "ExecutorConfig", "KvCacheConfig"]

EXIT_WAIT_S = 60.0  # far longer than any step; a kernel that hangs, or a `deliver`, never ends
_running: set[tuple[Inbox, threading.Thread]] = set()  # of executors that nobody has shut down


@atexit.register
def _end_all() -> None:
    """A program may end without `shutdown`. A worker in the middle of a step would then use memory
    that Python frees at its end, and the program would end by SIGSEGV. Those that
    never come to the end of their step are waited for no longer than EXIT_WAIT_S together."""
    ending = list(_running)
    for inbox, _ in ending:
        inbox.close()
    deadline_s = monotonic() + EXIT_WAIT_S
    for _, thread in ending:
        thread.join(max(0.0, deadline_s - monotonic()))
    if any(thread.is_alive() for _, thread in ending):
        print(
            f"llmctl: an executor was still in a step, or in a deliver, {EXIT_WAIT_S:g} s after "
            "the program's end; it is not waited for. Leave its with block, or call shutdown",
            file=sys.stderr,
        )


def _leave_to_parent() -> None:
    """A forked process has no workers, so whoever waits for one would wait for ever."""
    for inbox, _ in _running:
        inbox.leave_to_parent()
    _running.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class Executor:
    """Runs requests on a target engine, with or without a drafter. Thread-safe.

    `sampling` is the sampling of the target's backend; it also draws the drafter's tokens. With a
    `round_runner`, which must propose the same drafts as `drafter`, generation runs on the device
    without waiting for the host. `on_shutdown` is called when it has ended, to free what it alone
    used. Raises PairMismatch when drafter and target do not fit together.
    """

    def __init__(
        self,
        target: StepRunner,
        drafter: Drafter | None,
        config: ExecutorConfig,
        sampling: SamplingBackend,
        round_runner: RoundRunner | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._on_shutdown = on_shutdown
        self._mailbox = Mailbox()
        self._inbox = Inbox(self._mailbox, config.max_queue_size)
        parts = assemble(target, drafter or NoDrafter(), config, sampling, round_runner)
        self._worker = Worker(parts, config, self._inbox, self._mailbox)
        self._thread = threading.Thread(
            target=self._worker.run, name="llmctl-executor", daemon=True
        )
        # Objects of engines and libraries live as long as the executor: full garbage collections,
        # which stop generation, need not visit them. Undone by `shutdown`.
        self._has_frozen = freezing.freeze()
        self._thread.start()
        _running.add((self._inbox, self._thread))

    def enqueue_request(self, request: Request, deliver: Deliver | None = None) -> int:
        """Queue one request; returns its id at once. Raises ExecutorClosed or QueueFull.

        With `deliver`, its responses are passed to that callable on the executor's thread and do
        not appear in await_responses; it must not block. A request whose `deliver` raises is
        cancelled, and the exception goes to threading.excepthook.
        """
        return self._inbox.put([request], deliver)[0]

    def enqueue_requests(self, requests: Items[Request]) -> list[int]:
        """Queue all requests or none; returns ids in the same order."""
        return self._inbox.put(requests)

    @overload
    def await_responses(
        self, request_id: int | None = None, timeout_s: float | None = None
    ) -> list[Response]: ...
    @overload
    def await_responses(
        self, request_id: Items[int], timeout_s: float | None = None
    ) -> list[list[Response]]: ...
    def await_responses(
        self, request_id: int | Items[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Ready responses of any request, of one, or of each of several (a list of lists).

        Blocks until there is at least one (for each), or the timeout: then the list is empty. An
        unknown id, or one whose final response was taken, gives one error response. Raises
        BadConfig on the executor's own thread, as `shutdown` does. A thread that waits without a
        request open waits for those of others, until `shutdown`: it is a daemon thread where the
        program may end before.
        """
        self._refuse_own_thread("await_responses")
        wait_s = None if timeout_s is None else _seconds(timeout_s)
        asked = as_type("request_id", request_id, int | tuple[int, ...] | None)
        if asked is None:
            return self._mailbox.take_any(wait_s)
        if isinstance(asked, int):
            return self._mailbox.take(asked, wait_s)
        return self._mailbox.take_each(asked, wait_s)

    def generate(self, prompt: Request | Items[int], **request: Any) -> Iterator[int]:
        """New tokens of one output, one by one as they are generated.

        prompt: token ids, with the other fields of Request (at least max_tokens) as keywords, or a
        whole Request for one sequence. Closing the iterator cancels the request. Raises the error
        that ended the request, if there was one, and ExecutorClosed where a shutdown cut it.
        """
        if not isinstance(prompt, Request):
            prompt = Request(prompt, **request)  # type: ignore[arg-type]  # stored as a tuple
        elif request:
            raise BadConfig(
                f"generate has a whole Request and {', '.join(request)}; one of them is wanted",
                fix="set it in the Request, or give token ids as the prompt",
            )
        if prompt.sampling_config.num_return_sequences != 1:
            raise BadConfig(
                f"num_return_sequences is {prompt.sampling_config.num_return_sequences}; generate "
                "gives the tokens of one",
                fix="enqueue_request and await_responses",
            )
        output = replace(prompt.output_config, return_all_generated_tokens=False)
        request_id = self.enqueue_request(replace(prompt, streaming=True, output_config=output))
        is_final = False
        try:
            while not is_final:
                for response in self.await_responses(request_id):
                    is_final = response.result is None or response.result.is_final
                    yield from tokens_of(response)
        finally:
            if not is_final:
                self.cancel_request(request_id)
                while not any(
                    response.has_error or (response.result and response.result.is_final)
                    for response in self.await_responses(request_id)
                ):
                    # results of steps in flight; the last response says that the request has ended
                    pass

    def _refuse_own_thread(self, name: str) -> None:
        """A `deliver` would wait for the very thread that it is called on, for ever."""
        if threading.current_thread() is self._thread:
            raise BadConfig(
                f"{name} is called by a deliver, on the executor's own thread; it would wait for "
                "itself",
                fix="call it on another thread, to which deliver passes the response",
            )

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Responses that await_responses would return without waiting."""
        return self._mailbox.count(as_type("request_id", request_id, int | None))

    def cancel_request(self, request_id: int) -> None:
        """Ask for the end of a request; its final result says CANCELLED. No effect if it has
        ended. Raises BadConfig for what is no id."""
        self._inbox.cancel(as_type("request_id", request_id, int))

    def settle(self, timeout_s: float) -> bool:
        """Wait until no request is left and nothing can be done in advance for the next ones: CUDA
        graphs are captured while there are no requests. False after so many seconds."""
        return self._worker.is_settled.wait(_seconds(timeout_s))

    @property
    def num_graphs_captured(self) -> int:
        """CUDA graphs of device rounds captured so far. One that is captured while requests run
        delays their tokens by tens of milliseconds."""
        return self._worker.num_graphs_captured

    @property
    def thread(self) -> threading.Thread:
        """The worker's, which uses the engines while it is alive: until `shutdown` returns, or the
        worker failed."""
        return self._thread

    def can_enqueue_requests(self) -> bool:
        """False once the executor is shut down."""
        return not self._inbox.is_closed

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Steps since the last call, oldest first, up to the size of the history."""
        return self._worker.recorder.drain_iterations()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Per-request counts of the steps since the last call."""
        return self._worker.recorder.drain_requests()

    def get_kv_cache_event_manager(self) -> KvCacheEventManager:
        """The events of the KV cache: blocks stored and removed; see `event_buffer_max_size`."""
        return self._worker.kv_cache.events

    def get_speculation_stats(self) -> SpeculationStats:
        """Totals since the executor started; reading changes nothing."""
        return self._worker.recorder.speculation()

    def shutdown(self, *, drain: bool = False) -> None:
        """Cancel unfinished requests, or with `drain` finish them, and wait for the worker to end.
        May be called any number of times; a call without `drain` cuts short one with it."""
        self._refuse_own_thread("shutdown")
        self._inbox.close(drain=drain)
        self._thread.join()
        _running.discard((self._inbox, self._thread))
        if self._has_frozen:
            freezing.unfreeze()
            self._has_frozen = False
        self._on_shutdown()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def tokens_of(response: Response) -> tuple[int, ...]:
    """Of the response to a request that only its reader can cancel; raises its error, and
    ExecutorClosed where it was cancelled: fewer tokens would look like a whole output."""
    if response.result is None:
        raise response.error or AssertionError("neither a result nor an error")
    if response.result.finish_reason is FinishReason.CANCELLED:
        raise ExecutorClosed(
            "the executor was shut down before this output ended",
            fix="shutdown(drain=True) lets requests end",
        )
    return response.result.output_token_ids


def _seconds(timeout_s: float) -> float:
    """As threads can wait for them. Raises BadConfig for what is no number of seconds."""
    wait_s: float = as_type("timeout_s", timeout_s, float)
    if wait_s != wait_s:  # a wait for NaN seconds would never end, and never sleep
        raise BadConfig(
            "timeout_s is nan; it must be a number of seconds",
            fix="leave timeout_s out to wait for as long as it takes",
        )
    return min(wait_s, threading.TIMEOUT_MAX)
