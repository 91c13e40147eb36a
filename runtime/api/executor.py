"""The front door: requests in from any thread, responses out, one worker thread in between.

The shape is that of the TensorRT-LLM C++ executor, in snake_case. Every request ends in exactly one
of finished, refused, cancelled or failed; `runtime.worker` says how.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from types import TracebackType
from typing import Any, overload

from llmctl.errors import BadConfig
from llmctl.plugins.ops.sampling.spec import SamplingBackend
from llmctl.runtime.api.executor_config import ExecutorConfig, KvCacheConfig
from llmctl.runtime.api.inbox import Inbox
from llmctl.runtime.api.mailbox import Deliver, Mailbox
from llmctl.runtime.assembly import assemble
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.kv_cache import KvCacheEventManager
from llmctl.runtime.request import Request, Response
from llmctl.runtime.rounds.rounds import RoundRunner
from llmctl.runtime.stats.counters import IterationStats, RequestStatsPerIteration, SpeculationStats
from llmctl.runtime.step import StepRunner
from llmctl.runtime.worker import Worker

__all__ = ["Executor", "ExecutorConfig", "KvCacheConfig"]


class Executor:
    """Runs requests on a target engine, with a drafter or without. Thread-safe.

    `sampling` is the sampling of the target's backend; it draws the drafter's tokens too. With a
    `round_runner`, which must propose what `drafter` proposes, generation runs on the device
    without waiting for the host. Raises PairMismatch when drafter and target do not fit together.
    """

    def __init__(
        self,
        target: StepRunner,
        drafter: Drafter | None,
        config: ExecutorConfig,
        sampling: SamplingBackend,
        round_runner: RoundRunner | None = None,
    ) -> None:
        self.config = config
        self._mailbox = Mailbox()
        self._inbox = Inbox(self._mailbox, config.max_queue_size)
        parts = assemble(target, drafter or NoDrafter(), config, sampling, round_runner)
        self._worker = Worker(parts, config, self._inbox, self._mailbox)
        self._thread = threading.Thread(
            target=self._worker.run, name="llmctl-executor", daemon=True
        )
        # What the engines and libraries are made of stays: full garbage collections, during which
        # no token comes, need not walk it. Undone by `shutdown`.
        gc.freeze()
        self._thread.start()

    def enqueue_request(self, request: Request, deliver: Deliver | None = None) -> int:
        """Queue one request; returns its id at once. Raises ExecutorClosed or QueueFull.

        With `deliver`, its responses are passed to that on the executor's thread, and
        await_responses never has them; it must not block. A request whose `deliver` raises is
        cancelled, and what it raised goes to threading.excepthook.
        """
        return self._inbox.put([request], deliver)[0]

    def enqueue_requests(self, requests: Items[Request]) -> list[int]:
        """Queue all or none of the requests; ids in the same order."""
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
        unknown id, or one whose final response was taken, gives one error response.
        """
        if request_id is None:
            return self._mailbox.take_any(timeout_s)
        if isinstance(request_id, int):
            return self._mailbox.take(request_id, timeout_s)
        return self._mailbox.take_each(request_id, timeout_s)

    def generate(self, prompt: Request | Items[int], **request: Any) -> Iterator[int]:
        """New tokens of one output, one by one as steps bring them.

        prompt: token ids, with the other fields of Request (max_tokens at least) by name, or a
        whole Request of one returned sequence. Closing the iterator cancels the request. Raises
        what ended the request instead of an output.
        """
        if not isinstance(prompt, Request):
            prompt = Request(tuple(prompt), **request)
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
                    if response.result is None:
                        is_final = True
                        raise response.error or AssertionError("neither a result nor an error")
                    is_final = response.result.is_final
                    yield from response.result.output_token_ids
        finally:
            if not is_final:
                self.cancel_request(request_id)
                while not any(
                    response.has_error or (response.result and response.result.is_final)
                    for response in self.await_responses(request_id)
                ):
                    pass  # steps that were under way; the last response says that it has ended

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        """Responses that await_responses would return without waiting."""
        return self._mailbox.count(request_id)

    def cancel_request(self, request_id: int) -> None:
        """Ask for the end of a request; its final result says CANCELLED. No effect on one that
        has ended."""
        self._inbox.cancel(request_id)

    def can_enqueue_requests(self) -> bool:
        """False once the executor is shut down."""
        return not self._inbox.is_closed

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Steps since the last call, oldest first, as many as the history holds."""
        return self._worker.recorder.drain_iterations()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Per-request counts of the steps since the last call."""
        return self._worker.recorder.drain_requests()

    def get_kv_cache_event_manager(self) -> KvCacheEventManager:
        """Where to read what the KV cache stores and removes; see `event_buffer_max_size`."""
        return self._worker.kv_cache.events

    def get_speculation_stats(self) -> SpeculationStats:
        """Totals since the executor started; reading changes nothing."""
        return self._worker.recorder.speculation()

    def shutdown(self, *, drain: bool = False) -> None:
        """Cancel what is left, or with `drain` finish it, and wait for the worker to end. Any
        number of times; one without `drain` cuts one with it short."""
        self._inbox.close(drain=drain)
        self._thread.join()
        gc.unfreeze()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
