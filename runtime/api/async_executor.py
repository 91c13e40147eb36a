"""The executor for asyncio: `async for token in executor.generate(request)`.

Responses go from the executor's thread straight to the event loop; no thread waits for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from llmctl.errors import BadConfig
from llmctl.runtime.api.executor import Executor, tokens_of
from llmctl.runtime.api.mailbox import is_final
from llmctl.runtime.request import Request
from llmctl.runtime.response import Response


class _LoopBridge:
    """Carries responses from the executor's thread to an event loop. Waking the loop is the
    expensive part, so responses that arrive before it has woken share one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pending: deque[tuple[asyncio.Queue[Response], Response]] = deque()
        self._is_scheduled = False

    def post(self, queue: asyncio.Queue[Response], response: Response) -> None:
        """Called on the executor's thread."""
        self._pending.append((queue, response))
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Called on the event loop's thread. A response that is posted after this has started
        schedules a new call."""
        self._is_scheduled = False
        while self._pending:
            queue, response = self._pending.popleft()
            queue.put_nowait(response)


class AsyncExecutor:
    """The asyncio API of an executor, which may be used directly at the same time.

    Leaving an iterator early, by `break`, cancellation or an exception, cancels the request.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._last_bridge: _LoopBridge | None = None

    def _bridge(self) -> _LoopBridge:
        """The bridge to the running event loop."""
        loop = asyncio.get_running_loop()
        bridge = self._last_bridge
        if bridge is None or bridge.loop is not loop:
            bridge = self._last_bridge = _LoopBridge(loop)
        return bridge

    async def responses(self, request: Request) -> AsyncGenerator[Response, None]:
        """Every response, up to the final one. Raises ExecutorClosed or QueueFull."""
        arrived: asyncio.Queue[Response] = asyncio.Queue()
        post = self._bridge().post

        def deliver(response: Response) -> None:
            post(arrived, response)

        request_id = self.executor.enqueue_request(request, deliver)
        is_over = False
        try:
            while not is_over:
                response = await arrived.get()
                is_over = is_final(response)
                yield response
        finally:
            if not is_over:
                self.executor.cancel_request(request_id)

    async def generate(self, request: Request) -> AsyncGenerator[int, None]:
        """The output token by token, as it is generated; the request must be streaming and have one
        sequence. Raises the error that ended the request, if there was one, and ExecutorClosed
        where a shutdown cut it."""
        sampling, output = request.sampling_config, request.output_config
        if not request.streaming or output.return_all_generated_tokens:
            raise BadConfig(
                "generate yields tokens as they come; the request must be streaming, without "
                "return_all_generated_tokens",
                fix="set streaming=True, or read responses()",
            )
        if sampling.num_return_sequences != 1:
            raise BadConfig(
                f"num_return_sequences is {sampling.num_return_sequences}; generate yields the "
                "tokens of one sequence",
                fix="read responses(), which say whose tokens they carry",
            )
        responses = self.responses(request)
        try:
            async for response in responses:
                for token in tokens_of(response):
                    yield token
        finally:
            await responses.aclose()

    async def result(self, request: Request) -> list[Response]:
        """All responses of a request at once."""
        return [response async for response in self.responses(request)]

    async def shutdown(self, *, drain: bool = False) -> None:
        """End the executor without blocking the event loop; see Executor.shutdown."""
        await asyncio.to_thread(self.executor.shutdown, drain=drain)
